"""Places for members of gangs: the nodes that kube-scheduler has offered, failed attempts, and the plans that reserve
cards.

`gangs` decides what is planned when. A plan is one reservation in the phase WAITING for each member. Not thread-safe:
the state locks.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from sys import intern
from typing import Final, NamedTuple

from cardwise.clock import Clock
from cardwise.core.api.mpsprofile import COMMON
from cardwise.core.api.request import Load, PodRequest
from cardwise.core.gangs import gangplan
from cardwise.core.gangs.capacity import (
    LOOKS,
    Capacities,
    MemberShape,
    ShapeCapacity,
    count_at_least_as_demanding,
    shapes,
)
from cardwise.core.gangs.gangplan import Draft, Planned, Terms, TurnOver, Unplanned
from cardwise.core.gangs.gangs import Member
from cardwise.core.gangs.gangstate import Gang, GangPlan
from cardwise.core.placement import fitting
from extender.cache import yielding
from extender.cache.cache import Cache
from extender.cache.nominated import MAX_RESERVED_NODES, NominatedPods
from extender.cache.reservations import Phase, Reservations
from extender.cache.yielding import TURN
from extender.gangs.cardsearch import no_place_text
from extender.gangs.reservation import GangReservation
from extender.nomination.nominator import Nominator
from extender.records.podref import PodRef

_MOST_OFFERS: Final = 32  # that are compared with the next one
_PLAN_LOOKS: Final = 5 * LOOKS  # within a plan: the nodes of all its members may differ from those before it

CHEAP = 0.002  # seconds: a plan that fails faster than this may be tried again at once


class GangPlaces:
    """The offers and plans of all gangs.

    policy: the placement policy of pods that name none.
    """

    def __init__(
        self,
        *,
        cache: Cache,
        nominated: NominatedPods,
        nominator: Nominator,
        policy: str,
        clock: Clock,
    ) -> None:
        self._cache = cache
        self._ledger, self._loads = cache.ledger, cache.loads
        self._reservations = cache.reservations
        self._nominated = nominated
        self._reservation = GangReservation(cache, clock)
        self._nominator = nominator
        self._policy = policy
        self._clock = clock
        self._known: dict[str, _GangRecord] = {}  # by gang
        self._recent_offers: dict[frozenset[str], frozenset[str]] = {}  # the last one at the end
        self._capacities = Capacities(self._ledger, self._loads)

    # Offers of nodes.

    def add_offer(self, gang: Gang, shape: str, nodes: Collection[str]) -> None:
        """Record that kube-scheduler offers these nodes for a member of this shape."""
        offer = self._share_offer(nodes)
        record = self._known.setdefault(gang.key, _GangRecord())
        if record.offers.get(shape) != offer:
            record.offers[shape] = offer
            record.changes += 1
        self._reservation.add_offer(gang.key, shape, offer)

    def _share_offer(self, nodes: Collection[str]) -> frozenset[str]:
        """The offer as one object for all equal ones.

        The planner looks at each object once, and an offer of thousands of nodes takes a MiB. Offers that differ share
        the names of nodes.
        """
        offer = frozenset(nodes)
        shared = self._recent_offers.pop(offer, None)
        if shared is None:
            shared = frozenset(map(intern, offer))
        self._recent_offers[shared] = shared
        if len(self._recent_offers) > _MOST_OFFERS:
            del self._recent_offers[next(iter(self._recent_offers))]
        return shared

    def has_offers(self, gang: Gang) -> bool:
        """Whether kube-scheduler has ever called filter for a member."""
        return bool(self._known_of(gang).offers)

    def remove_gang(self, key: str) -> None:
        """Forget the gang: it is gone, or runs."""
        self._known.pop(key, None)
        self._reservation.remove_gang(key)

    def reset(self) -> None:
        """Forget what was recorded in an earlier leader epoch."""
        self._known.clear()
        self._reservation.reset()

    def update_reservation(self, due: Sequence[Gang], now: float) -> bool:
        """Choose the gang for which cards are reserved, among these gangs, which have waited too long.

        Returns whether cards that were reserved are released.
        """
        return self._reservation.update(due, self._policy, now)

    @property
    def half_reserved(self) -> bool:
        """Whether the next call of `update_reservation` continues a plan."""
        return self._reservation.is_half_planned

    # Plans.

    def plan_of(self, key: str) -> GangPlan:
        """A live view of the plan of the gang, "namespace/name"."""
        return _Rows(self._reservations, key)

    def may_fit(self, gang: Gang, now: float) -> bool:
        """Whether to plan the gang: not if a plan failed a moment ago and nothing has changed."""
        record = self._known_of(gang)
        return now >= record.not_before and record.tried != self._plan_inputs(gang, now)

    def try_plan(self, gang: Gang, now: float) -> bool | None:
        """Plan all missing members, if they may fit. Returns whether they have places; None: the next call continues
        the plan.
        """
        if not self.may_fit(gang, now):
            return False
        began, members = self._clock.cpu(), gang.missing_in_plan()
        record, state = self._known.setdefault(gang.key, _GangRecord()), self._plan_inputs(gang, now)
        inputs_seen: _PlanInputs | None = state
        short, complete = self._find_unplaceable(members)
        if not complete:
            return None
        if short is not None:
            gang.reason = self._reservation.impossible_reason(gang) or no_place_text(short)
        else:
            draft = record.take_draft(members, state, Draft(self._clock.cpu, TURN))
            placed = self.place_members(gang, members, now, draft)
            if placed is None:
                record.draft = draft
                return None
            if placed:
                record.tried = None
                return True
            # What has changed since the first turn was not seen, or not in time.
            inputs_seen = record.drafted if not draft.moved else None
        cost = self._clock.cpu() - began
        if cost > CHEAP:
            record.not_before = now + yielding.pause_seconds(cost)
        if (
            inputs_seen is None
            or record.tried is None
            or record.tried._replace(members=inputs_seen.members) != inputs_seen
        ):
            gang.mark_refused(now)  # changes of members do not count: more members would have cards reserved sooner
        record.tried = inputs_seen
        return False

    def move_members(self, gang: Gang, uids: Iterable[str], now: float) -> bool:
        """Give these members of the plan other places, if that takes no longer than a turn. Returns whether
        it succeeded.
        """
        return bool(self.place_members(gang, [gang.members[uid] for uid in uids], now, Draft(self._clock.cpu, TURN)))

    def place_members(self, gang: Gang, members: Sequence[Member], now: float, draft: Draft) -> bool | None:
        """Place all of these members, in place of what they had in the gang's plan, and reserve their cards.

        If one of them has no place, nothing changes. Returns whether all have places; None: the turn is over, and the
        next call continues the draft.
        """
        uids = [member.uid for member in members]
        for member in members:
            if self._reservations.known_binding(member.uid) is not None:
                gang.reason = f"an earlier Binding of {member.name} may still succeed; it is looked up first"
                return False
        _, _, created, _ = gang.rank()
        holders = [uid for uid in uids if self._ledger.holding(uid) is not None]
        try:
            with self._ledger.what_if(released=holders), self._loads.what_if(unplanned=uids):
                outcome = self._plan_beside_reserved(gang, members, now, draft)
                later = (
                    self._nominator.later_nominations(gang.priority, created) if isinstance(outcome, Unplanned) else ()
                )
                if later:
                    with self._nominator.exclude_nominations(later):
                        planned_without = self._plan_beside_reserved(gang, members, now, draft)
                    if isinstance(planned_without, Planned):
                        self._nominator.release_overtaken(later, set(planned_without.nodes.values()), gang.namespace)
                        outcome = self._plan_beside_reserved(gang, members, now, draft)
        except TurnOver:
            return None
        if isinstance(outcome, Unplanned):
            gang.reason = self._reservation.impossible_reason(gang) or no_place_text(outcome.member)
            return False
        gang.mark_planned(uids, now)
        for uid in uids:
            self._reservations.release_plan(uid)
        for member in members:
            self._reservations.set_plan(
                PodRef(member.uid, gang.namespace, member.name),
                outcome.nodes[member.uid],
                outcome.assignments.get(member.uid),
                Phase.WAITING,
                mps_client=member.request.mps_client if member.request is not None else COMMON,
                load=member.load,
                gang=gang.key,
            )
        return True

    def _plan_beside_reserved(
        self, gang: Gang, members: Sequence[Member], now: float, draft: Draft
    ) -> Planned | Unplanned:
        """A plan that leaves what is reserved for nominated pods and for another gang."""
        own_uids, priority = gang.members, gang.priority
        nominated_nodes, reserved = self._nominated.reserved_nodes(own_uids, priority), self._gang_reserved_nodes(gang)
        last_nodes = {*reserved, *(nominated_nodes if len(nominated_nodes) > MAX_RESERVED_NODES else ())}
        if last_nodes:  # as `Placing.place` does
            with self._nominated.count_reserved(own_uids, priority, nominated_nodes - last_nodes):
                outcome = self._plan(members, self._make_terms(gang, now, draft, without=last_nodes))
            if isinstance(outcome, Planned):
                return outcome
            nominated_nodes = self._nodes_for_any(members, nominated_nodes)
        counted, without = self._split_reserved(members, reserved)
        with (
            self._nominated.count_reserved(own_uids, priority, nominated_nodes),
            self._cache.gang_cards.count_reserved(counted),
        ):
            return self._plan(members, self._make_terms(gang, now, draft, without=without))

    def _gang_reserved_nodes(self, gang: Gang) -> set[str]:
        """The nodes where cards are reserved for another gang, which this one must not use."""
        return set(self._cache.gang_cards.reserved_nodes(gang.rank(), gang.namespace))

    def _split_reserved(self, members: Iterable[Member], reserved: set[str]) -> tuple[set[str], set[str]]:
        """Split nodes with a reservation: those whose other cards may be used, and those that are left out.

        Nodes are left out if there are many: counting what is reserved on them takes longer than other callers may
        wait.
        """
        reserved = self._nodes_for_any(members, reserved) if reserved else reserved
        return (reserved, set()) if len(reserved) <= MAX_RESERVED_NODES else (set(), reserved)

    def _plan(self, members: Sequence[Member], terms: Terms) -> Planned | Unplanned:
        """A plan, if possible one in which nominated members get the nodes that kube-scheduler has nominated for them.

        kube-scheduler offers these members no other nodes, and counts the members there for all other pods.
        """
        offers_by_shape, planned = dict[str, frozenset[str]](), list[Member]()
        for member in members:
            node = self._reservations.nominations.nominated_node(member.uid)
            if node and (member.shape, node) not in terms.avoided:
                shape = f"{member.shape}@{node}"
                offers_by_shape[shape] = frozenset({node})
                planned.append(replace(member, shape=shape))
            else:
                planned.append(member)
        if offers_by_shape:
            offers = {**terms.offers, **offers_by_shape}
            outcome = gangplan.plan(self._ledger, self._loads, planned, replace(terms, offers=offers))
            if isinstance(outcome, Planned):
                return outcome
        return gangplan.plan(self._ledger, self._loads, members, terms)

    def _nodes_for_any(self, members: Iterable[Member], nodes: set[str]) -> set[str]:
        """The given nodes that could take one of the members; all of them if that is unknown."""
        vacant = [self._vacant(*shape) for shape in shapes(members)]
        if any(candidates is None for candidates in vacant):
            return nodes
        return {
            node for node in nodes if any(candidates is not None and node in candidates.counts for candidates in vacant)
        }

    def count_capacities(self, members: Sequence[Member], until: float) -> bool:
        """Count the capacity of nodes until `until` (CPU seconds of this thread), so that a plan of these members reads
        few nodes.

        Returns whether all were known before.
        """
        known = True
        while not all(self._capacities.count_pods(shape)[1] for shape in shapes(members)):
            known = False
            if self._clock.cpu() >= until:
                break
        return known

    def simulate_plan(
        self, gang: Gang, members: Sequence[Member], now: float, *, shape: str, more_nodes: Iterable[str]
    ) -> Planned | None:
        """Places for these members if members of `shape` were offered the nodes `more_nodes`, too; reserves nothing.
        None: there are none.
        """
        if self._find_unplaceable(members)[0] is not None:
            return None
        counted, without = self._split_reserved(members, self._gang_reserved_nodes(gang))
        terms = self._make_terms(gang, now, without=without)
        offers = {**terms.offers, shape: {*terms.offers.get(shape, ()), *more_nodes}}
        with self._cache.gang_cards.count_reserved(counted):
            outcome = gangplan.plan(self._ledger, self._loads, members, replace(terms, offers=offers))
        return outcome if isinstance(outcome, Planned) else None

    def invalid_part(self, gang: Gang) -> str | None:
        """The part of the plan that is no longer valid, for people; None if all of it is valid."""
        for uid, node in gang.plan.items():
            member, holding = gang.members[uid], self._ledger.holding(uid)
            is_valid = self._loads.free_load(node) is not None
            if is_valid and member.request is not None:
                is_valid = holding is not None and self._cache.is_plan_valid(holding, member.request)
            if not is_valid:
                return f"the GPUs planned for {member.name} on node {node} are no longer available"
        return None

    def _known_of(self, gang: Gang) -> "_GangRecord":
        return self._known.get(gang.key, _NOTHING)

    def _make_terms(
        self, gang: Gang, now: float, draft: Draft | None = None, *, without: Collection[str] = ()
    ) -> Terms:
        """The terms of a plan. `without`: nodes that no member with cards may have."""

        def closed(member: Member, node: str) -> bool:
            return node in without and member.request is not None

        return Terms(
            policy=self._policy,
            headroom=self._cache.headroom(gang.namespace),
            offers=self._known_of(gang).offers,
            avoided=gang.avoided_pairs(now),
            closed=closed if without else None,
            vacant=self._vacant,
            draft=draft,
        )

    def _plan_inputs(self, gang: Gang, now: float) -> "_PlanInputs":
        freed = self._cache.capacity.freed_count + self._loads.freed_count
        return _PlanInputs(freed, gang.changes, self._known_of(gang).changes, tuple(gang.avoided_pairs(now)))

    def _find_unplaceable(self, members: Iterable[Member]) -> tuple[Member | None, bool]:
        """A member that has no place in any plan, None if there is none; and whether all nodes were counted
        for that.
        """
        known, until, alike = True, self._clock.cpu() + TURN, shapes(members)
        for shape, needed in count_at_least_as_demanding(alike).items():
            fitting_count, complete = self._capacities.count_pods(shape)
            if complete and fitting_count < needed and fitting_count + self._capacity_reserved_ahead(shape) < needed:
                return alike[shape][-1], True
            known &= complete
            if not known and self._clock.cpu() >= until:
                break
        return None, known

    def _capacity_reserved_ahead(self, shape: MemberShape) -> int:
        """How many more members would fit at most, if nothing were reserved ahead."""
        least = min(
            (card_request.mem for card_request in fitting.card_requests(shape.request) if not card_request.whole),
            default=0,
        )
        additional = 0
        for row in self._reservations.rows_in_phases(Phase.NOMINATED):
            shares = row.assignment.shares() if row.assignment is not None else ()
            on_cards = sum(share.mem // least + 1 if least else 1 for share in shares)
            cpu, memory, _ = row.load or Load(0, 0, 0)
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
        # Pods with reservations ahead may lose them.
        return self._capacities.nodes(shape).with_minimum(
            row.node for row in self._reservations.rows_in_phases(Phase.NOMINATED)
        )


class _PlanInputs(NamedTuple):
    """The inputs of a plan. While they are equal, a failed plan fails again.

    freed: how often something became free.
    members, offers: how often the gang's members and its offers have changed.
    avoided: which shape avoids which node.
    """

    freed: int
    members: int
    offers: int
    avoided: tuple[tuple[str, str], ...]


@dataclass(slots=True, eq=False)
class _GangRecord:
    """The offers and the failed plan of one gang.

    offers: the nodes that kube-scheduler has offered, by shape.
    changes: how often the offers have changed.
    tried: the state of the last plan that failed, after which there is a pause until `not_before`.
    draft: a plan for `members` that takes several turns.
    drafted: the state when the draft was begun.
    """

    offers: dict[str, frozenset[str]] = field(default_factory=dict)
    changes: int = 0
    tried: _PlanInputs | None = None
    not_before: float = float("-inf")
    draft: Draft | None = None
    members: Sequence[Member] = ()
    drafted: _PlanInputs | None = None

    def take_draft(self, members: Sequence[Member], state: _PlanInputs, new: Draft) -> Draft:
        """Continue the unfinished plan for these members (a `Draft`), or begin with `new`.

        The record has no draft until the caller stores one again, so an exception leaves no half-changed draft.
        """
        draft, self.draft = self.draft, None
        if draft is None or self.members != members:
            draft, self.members, self.drafted = new, members, state
        draft.begin()
        return draft


_NOTHING: Final = _GangRecord()


class _Rows(GangPlan):
    """The gang's rows in the table of reservations."""

    def __init__(self, table: Reservations, key: str) -> None:
        self._table = table
        self._key = key

    def __getitem__(self, uid: str) -> str:
        return self._table.gang_plan(self._key)[uid].node

    def __iter__(self) -> Iterator[str]:
        return iter(self._table.gang_plan(self._key))

    def __len__(self) -> int:
        return len(self._table.gang_plan(self._key))

    def release(self, uids: Iterable[str]) -> None:
        for uid in uids:
            self._table.release_plan(uid)
