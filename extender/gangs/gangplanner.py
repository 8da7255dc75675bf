"""Plans gangs in a snapshot of the cluster: which node and cards each member gets.

Uses `cardwise.core.gangs.gangplan`, and adds the reservations for other pods. Plans do not use cards that are reserved
for nominated pods. Nodes with the reservation of another gang are used last. Reserves nothing.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from cardwise.core.api.request import Load, PodRequest
from cardwise.core.gangs import gangplan
from cardwise.core.gangs.capacity import (
    Capacities,
    MemberShape,
    ShapeCapacity,
    count_at_least_as_demanding,
    group_by_shape,
)
from cardwise.core.gangs.gangplan import Pace, PlanConstraints, Planned, Unplanned
from cardwise.core.gangs.gangs import Member, Rank
from cardwise.core.placement import fitting
from extender.cache.clusterview import ClusterView
from extender.cache.nominated import MAX_RESERVED_NODES, NominatedPods
from extender.placing.nodefacts import NodeFacts


class GangToPlan(NamedTuple):
    """The data of a gang that a plan needs.

    rank: the gang's position in the order of gangs and pods.
    priority: the highest priority of the members.
    uids: the UIDs of all members, planned or not.
    offers: the nodes that kube-scheduler has offered, by shape of members.
    avoided: pairs of a shape and a node that kube-scheduler recently did not offer for the shape.
    peer_nodes: by `PodRequest.peer_key` of the members, the nodes of the peers (`Reservations.peer_nodes`).
    """

    namespace: str
    rank: Rank
    priority: int
    uids: Collection[str]
    offers: Mapping[str, frozenset[str]]
    avoided: Collection[tuple[str, str]]
    peer_nodes: Mapping[str, Mapping[str, str]] = {}


class GangPlanner:
    """Plans gangs in one snapshot. Changes the snapshot temporarily. Not thread-safe.

    Remembers how many members of each shape fit on a node, until the node changes.

    policy: the placement policy of pods that name none.
    capacities: the capacities of the snapshot's nodes, from an earlier planner.
    """

    def __init__(
        self, cluster: ClusterView, nominated: NominatedPods, *, policy: str, capacities: Capacities | None = None
    ) -> None:
        self._cluster = cluster
        self._nominated = nominated
        self._policy = policy
        self._capacities = capacities or Capacities(cluster.ledger, cluster.loads)

    def move_to(self, snapshot: ClusterView, nominated: NominatedPods) -> "GangPlanner":
        """A planner on a newer snapshot; it reuses the capacities of unchanged nodes.

        The present planner must not be used any more.
        """
        self._capacities.move_to(snapshot.ledger, snapshot.loads)
        return GangPlanner(snapshot, nominated, policy=self._policy, capacities=self._capacities)

    def find_unplaceable_member(self, members: Iterable[Member], pace: Pace = lambda: None) -> Member | None:
        """A member that no plan can place; None if every member may get a place."""
        members_by_shape = group_by_shape(members)
        for shape, needed in count_at_least_as_demanding(members_by_shape).items():
            fitting_count = self._capacities.count_fitting_pods(shape, pace)
            if fitting_count < needed and fitting_count + self._count_on_nominated_places(shape) < needed:
                return members_by_shape[shape][-1]
        return None

    def count_capacities(self, members: Sequence[Member], pace: Pace) -> None:
        """Compute the capacity of nodes for these members, so that a later plan reads few nodes."""
        for shape in group_by_shape(members):
            self._capacities.count_fitting_pods(shape, pace)

    def plan(
        self, gang: GangToPlan, members: Sequence[Member], pace: Pace, *, without: Collection[str] = ()
    ) -> Planned | Unplanned:
        """A plan that does not use the cards that are reserved for nominated pods or for another gang.

        pace: see `gangplan.plan`.
        without: nodes that the plan must not use.
        """
        own_uids, priority = gang.uids, gang.priority
        nominated_nodes, reserved = self._nominated.reserved_nodes(own_uids, priority), self._gang_reserved_nodes(gang)
        last_nodes = {*reserved, *(nominated_nodes if len(nominated_nodes) > MAX_RESERVED_NODES else ())}
        if last_nodes:  # as `Placing.place` does
            with self._nominated.count_reserved(own_uids, priority, nominated_nodes - last_nodes, pace):
                constraints = self._make_terms(gang, members, without, without_cards=last_nodes)
                outcome = self._plan(members, constraints, pace)
            if isinstance(outcome, Planned):
                return outcome
            nominated_nodes = self._nodes_for_any(members, nominated_nodes)
        counted, left_out = self._split_reserved(members, reserved)
        with (
            self._nominated.count_reserved(own_uids, priority, nominated_nodes, pace),
            self._cluster.gang_cards.count_reserved(counted),
        ):
            return self._plan(members, self._make_terms(gang, members, without, without_cards=left_out), pace)

    def simulate_plan(
        self, gang: GangToPlan, members: Sequence[Member], *, shape: str, more_nodes: Iterable[str]
    ) -> Planned | None:
        """The plan of these members if kube-scheduler also offered the nodes `more_nodes` for members of `shape`.

        Returns None if there is no such plan. Reserves nothing.
        """
        if self.find_unplaceable_member(members) is not None:
            return None
        counted, left_out = self._split_reserved(members, self._gang_reserved_nodes(gang))
        constraints = self._make_terms(gang, members, without_cards=left_out)
        offers = {**constraints.offers, shape: {*constraints.offers.get(shape, ()), *more_nodes}}
        with self._cluster.gang_cards.count_reserved(counted):
            outcome = gangplan.plan(
                self._cluster.ledger, self._cluster.loads, members, replace(constraints, offers=offers)
            )
        return outcome if isinstance(outcome, Planned) else None

    def _gang_reserved_nodes(self, gang: GangToPlan) -> set[str]:
        """The nodes with cards that are reserved for another gang, and that this gang must not use."""
        return set(self._cluster.gang_cards.reserved_nodes(gang.rank, gang.namespace))

    def _split_reserved(self, members: Iterable[Member], reserved: set[str]) -> tuple[set[str], set[str]]:
        """Split the nodes with a gang reservation: nodes whose unreserved part may be used, and nodes that are left
        out.

        If there are many such nodes, all are left out: adding their reservations to the ledger would take longer than
        other callers may wait.
        """
        reserved = self._nodes_for_any(members, reserved) if reserved else reserved
        return (reserved, set()) if len(reserved) <= MAX_RESERVED_NODES else (set(), reserved)

    def _plan(self, members: Sequence[Member], constraints: PlanConstraints, pace: Pace) -> Planned | Unplanned:
        """A plan. If possible, nominated members get the nodes that kube-scheduler has nominated for them.

        kube-scheduler offers a nominated member only its nominated node. When it schedules other pods, it treats the
        member as if it were on that node.
        """
        offers_by_shape, planned = dict[str, frozenset[str]](), list[Member]()
        for member in members:
            node = self._cluster.nominations.nominated_node(member.uid)
            if node and (member.shape, node) not in constraints.avoided:
                shape = f"{member.shape}@{node}"
                offers_by_shape[shape] = frozenset({node})
                planned.append(replace(member, shape=shape))
            else:
                planned.append(member)
        if offers_by_shape:
            offers = {**constraints.offers, **offers_by_shape}
            terms_with_names = replace(constraints, offers=offers)
            outcome = gangplan.plan(self._cluster.ledger, self._cluster.loads, planned, terms_with_names, pace)
            if isinstance(outcome, Planned):
                return outcome
        return gangplan.plan(self._cluster.ledger, self._cluster.loads, members, constraints, pace)

    def _nodes_for_any(self, members: Iterable[Member], nodes: set[str]) -> set[str]:
        """The given nodes on which at least one of the members fits."""
        vacant = [self._vacant(*shape).counts for shape in group_by_shape(members)]
        return {node for node in nodes if any(node in counts for counts in vacant)}

    def _make_terms(
        self,
        gang: GangToPlan,
        members: Sequence[Member],
        without: Collection[str] = (),
        *,
        without_cards: Collection[str] = (),
    ) -> PlanConstraints:
        """The constraints of a plan of these members.

        without: nodes on which no member may be placed.
        without_cards: nodes on which no member with cards may be placed.
        """

        def closed(member: Member, node: str) -> bool:
            return node in without or (node in without_cards and member.request is not None)

        uids = {member.uid for member in members}

        def facts(peer_key: str | None) -> NodeFacts:
            peer_nodes = gang.peer_nodes.get(peer_key, {}) if peer_key is not None else {}
            counts = Counter(node for uid, node in peer_nodes.items() if uid not in uids)
            return NodeFacts(self._cluster.loads, counts)

        return PlanConstraints(
            policy=self._policy,
            headroom=self._cluster.headroom(gang.namespace),
            offers=gang.offers,
            avoided=gang.avoided,
            closed=closed if without or without_cards else None,
            vacant=self._vacant,
            facts=facts if gang.peer_nodes else None,
        )

    def _count_on_nominated_places(self, shape: MemberShape) -> int:
        """The maximum number of further members that could fit without reservations for pods ahead of filter."""
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

    def _vacant(self, request: PodRequest, load: Load) -> ShapeCapacity:
        shape = MemberShape(request, load)
        self._capacities.count_fitting_pods(shape)
        # A nominated pod may lose its reservation to the gang, so its node counts as a node with capacity.
        return self._capacities.shape_capacity(shape).with_at_least_one_pod_on(
            place.node for place in self._cluster.places_ahead()
        )
