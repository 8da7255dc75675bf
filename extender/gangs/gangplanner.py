"""Plans gangs in the cluster as it is, or in a snapshot: which node and cards each member gets.

Uses `cardwise.core.gangs.gangplan`, and adds the reservations for other pods: cards that are reserved for nominated
pods are not used, and nodes with the gang reservation of another gang are used last. Reserves nothing.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from cardwise.clock import Clock
from cardwise.core.api.request import Load, PodRequest
from cardwise.core.gangs import gangplan
from cardwise.core.gangs.capacity import (
    MAX_COUNTED_NODES,
    Capacities,
    MemberShape,
    ShapeCapacity,
    count_at_least_as_demanding,
    shapes,
)
from cardwise.core.gangs.gangplan import Draft, Planned, Terms, Unplanned
from cardwise.core.gangs.gangs import Member, Rank
from cardwise.core.placement import fitting
from extender.cache.clusterview import ClusterView
from extender.cache.nominated import MAX_RESERVED_NODES, NominatedPods
from extender.cache.yielding import TURN_SECONDS

_PLAN_LOOKS: Final = (
    5 * MAX_COUNTED_NODES
)  # the most nodes that are counted within a plan: all nodes of its members may have changed since the last plan


class PlannedGang(NamedTuple):
    """The data of a gang that a plan needs.

    rank: the gang's place in the order of gangs and pods.
    priority: the highest priority of the members.
    uids: the UIDs of all members, planned or not.
    offers: the nodes that kube-scheduler has offered, by shape of members.
    avoided: pairs of a shape and a node that kube-scheduler recently did not offer for the shape.
    """

    namespace: str
    rank: Rank
    priority: int
    uids: Collection[str]
    offers: Mapping[str, frozenset[str]]
    avoided: Collection[tuple[str, str]]


class GangPlanner:
    """Plans in one cluster view. Remembers how many members of each shape fit on a node, until the node changes.

    policy: the placement policy of pods that name none.
    """

    def __init__(self, cluster: ClusterView, nominated: NominatedPods, *, policy: str, clock: Clock) -> None:
        self._cluster = cluster
        self._nominated = nominated
        self._policy = policy
        self._clock = clock
        self._capacities = Capacities(cluster.ledger, cluster.loads)

    def on_snapshot(self, snapshot: ClusterView, nominated: NominatedPods) -> "GangPlanner":
        """A planner on the snapshot, for a thread without the lock. Its capacities are not counted yet."""
        return GangPlanner(snapshot, nominated, policy=self._policy, clock=self._clock)

    def find_unplaceable(self, members: Iterable[Member]) -> tuple[Member | None, bool]:
        """A member that has no place in any plan, None if there is none; and whether the capacity of all nodes was
        counted.
        """
        known, until, members_by_shape = True, self._clock.cpu() + TURN_SECONDS, shapes(members)
        for shape, needed in count_at_least_as_demanding(members_by_shape).items():
            fitting_count, complete = self._capacities.count_pods(shape)
            if complete and fitting_count < needed and fitting_count + self._count_on_nominated_places(shape) < needed:
                return members_by_shape[shape][-1], True
            known &= complete
            if not known and self._clock.cpu() >= until:
                break
        return None, known

    def count_capacities(self, members: Sequence[Member], is_over: Callable[[], bool]) -> None:
        """Count the capacity of nodes, so that a later plan of these members reads few nodes. Ends early if `is_over`
        returns True.
        """
        for shape in shapes(members):
            while not self._capacities.count_pods(shape)[1] and not is_over():
                pass

    def plan_beside_reserved(self, gang: PlannedGang, members: Sequence[Member], draft: Draft) -> Planned | Unplanned:
        """A plan that does not use the cards that are reserved for nominated pods or for another gang.

        Raises TurnOver if the turn of the draft is over.
        """
        own_uids, priority = gang.uids, gang.priority
        nominated_nodes, reserved = self._nominated.reserved_nodes(own_uids, priority), self._gang_reserved_nodes(gang)
        last_nodes = {*reserved, *(nominated_nodes if len(nominated_nodes) > MAX_RESERVED_NODES else ())}
        if last_nodes:  # as `Placing.place` does
            with self._nominated.count_reserved(own_uids, priority, nominated_nodes - last_nodes):
                outcome = self._plan(members, self._make_terms(gang, draft, without=last_nodes))
            if isinstance(outcome, Planned):
                return outcome
            nominated_nodes = self._nodes_for_any(members, nominated_nodes)
        counted, without = self._split_reserved(members, reserved)
        with (
            self._nominated.count_reserved(own_uids, priority, nominated_nodes),
            self._cluster.gang_cards.count_reserved(counted),
        ):
            return self._plan(members, self._make_terms(gang, draft, without=without))

    def simulate_plan(
        self, gang: PlannedGang, members: Sequence[Member], *, shape: str, more_nodes: Iterable[str]
    ) -> Planned | None:
        """The plan of these members if kube-scheduler also offered the nodes `more_nodes` for members of `shape`.

        Returns None if there is no such plan. Reserves nothing.
        """
        if self.find_unplaceable(members)[0] is not None:
            return None
        counted, without = self._split_reserved(members, self._gang_reserved_nodes(gang))
        terms = self._make_terms(gang, without=without)
        offers = {**terms.offers, shape: {*terms.offers.get(shape, ()), *more_nodes}}
        with self._cluster.gang_cards.count_reserved(counted):
            outcome = gangplan.plan(self._cluster.ledger, self._cluster.loads, members, replace(terms, offers=offers))
        return outcome if isinstance(outcome, Planned) else None

    def _gang_reserved_nodes(self, gang: PlannedGang) -> set[str]:
        """The nodes with cards that are reserved for another gang, and that this gang must not use."""
        return set(self._cluster.gang_cards.reserved_nodes(gang.rank, gang.namespace))

    def _split_reserved(self, members: Iterable[Member], reserved: set[str]) -> tuple[set[str], set[str]]:
        """Split the nodes with a gang reservation: nodes whose free part may be used, and nodes that are left out.

        If there are many, all are left out: counting their reservations would take longer than other callers may wait.
        """
        reserved = self._nodes_for_any(members, reserved) if reserved else reserved
        return (reserved, set()) if len(reserved) <= MAX_RESERVED_NODES else (set(), reserved)

    def _plan(self, members: Sequence[Member], terms: Terms) -> Planned | Unplanned:
        """A plan, if possible one in which nominated members get the nodes that kube-scheduler has nominated for them.

        kube-scheduler offers a nominated member only its nominated node, and counts the member's resources on that node
        when it schedules other pods.
        """
        offers_by_shape, planned = dict[str, frozenset[str]](), list[Member]()
        for member in members:
            node = self._cluster.nominations.nominated_node(member.uid)
            if node and (member.shape, node) not in terms.avoided:
                shape = f"{member.shape}@{node}"
                offers_by_shape[shape] = frozenset({node})
                planned.append(replace(member, shape=shape))
            else:
                planned.append(member)
        if offers_by_shape:
            offers = {**terms.offers, **offers_by_shape}
            outcome = gangplan.plan(self._cluster.ledger, self._cluster.loads, planned, replace(terms, offers=offers))
            if isinstance(outcome, Planned):
                return outcome
        return gangplan.plan(self._cluster.ledger, self._cluster.loads, members, terms)

    def _nodes_for_any(self, members: Iterable[Member], nodes: set[str]) -> set[str]:
        """The given nodes on which at least one of the members fits; all nodes if the capacity is not counted yet."""
        vacant = [self._vacant(*shape) for shape in shapes(members)]
        if any(candidates is None for candidates in vacant):
            return nodes
        return {
            node for node in nodes if any(candidates is not None and node in candidates.counts for candidates in vacant)
        }

    def _make_terms(self, gang: PlannedGang, draft: Draft | None = None, *, without: Collection[str] = ()) -> Terms:
        """The terms of a plan. `without`: nodes on which no member with cards may be placed."""

        def closed(member: Member, node: str) -> bool:
            return node in without and member.request is not None

        return Terms(
            policy=self._policy,
            headroom=self._cluster.headroom(gang.namespace),
            offers=gang.offers,
            avoided=gang.avoided,
            closed=closed if without else None,
            vacant=self._vacant,
            draft=draft,
        )

    def _count_on_nominated_places(self, shape: MemberShape) -> int:
        """The most further members that could fit if there were no reservations for pods before filter is called."""
        least = min(
            (card_request.mem for card_request in fitting.card_requests(shape.request) if not card_request.whole),
            default=0,
        )
        additional = 0
        for place in self._cluster.places_ahead():
            shares = place.assignment.shares() if place.assignment is not None else ()
            on_cards = sum(share.mem // least + 1 if least else 1 for share in shares)
            cpu, memory, _ = place.load or Load(0, 0, 0)
            by_load = max(
                1 + cpu // shape.load.cpu if shape.load.cpu else 1,
                1 + memory // shape.load.memory if shape.load.memory else 1,
            )
            additional += max(on_cards, by_load)
        return additional

    def _vacant(self, request: PodRequest, load: Load) -> ShapeCapacity | None:
        shape = MemberShape(request, load)
        if not self._capacities.count_pods(shape, _PLAN_LOOKS)[1]:
            return None
        # A nominated pod may lose its reservation to the gang, so its node counts as a node with capacity.
        return self._capacities.nodes(shape).with_minimum(place.node for place in self._cluster.places_ahead())
