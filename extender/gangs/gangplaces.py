"""Places for members of gangs: the nodes that kube-scheduler has offered, failed attempts, and the plans that reserve
cards.

`gangs` decides when a gang is planned. A plan is one reservation in the phase WAITING for each member. Not thread-safe:
the state locks.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from sys import intern
from typing import Final, NamedTuple

from cardwise.clock import Clock
from cardwise.core.api.mpsprofile import COMMON
from cardwise.core.gangs.gangplan import Draft, Planned, TurnOver, Unplanned
from cardwise.core.gangs.gangs import Member
from cardwise.core.gangs.gangstate import Gang, GangPlan
from extender.cache import yielding
from extender.cache.cache import Cache
from extender.cache.nominated import NominatedPods
from extender.cache.reservations import Phase, Reservations
from extender.cache.yielding import TURN_SECONDS
from extender.gangs.cardsearch import no_place_text
from extender.gangs.gangplanner import GangPlanner, PlannedGang
from extender.gangs.reservation import GangReservation
from extender.nomination.nominator import Nominator
from extender.records.podref import PodRef

_MOST_OFFERS: Final = 32  # the most recent offers; a new offer that equals one of them shares its memory

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
        self._reservation = GangReservation(cache, clock)
        self._nominator = nominator
        self._policy = policy
        self._clock = clock
        self._known: dict[str, _GangRecord] = {}  # by gang
        self._recent_offers: dict[frozenset[str], frozenset[str]] = {}  # the latest at the end
        self.planner = GangPlanner(cache, nominated, policy=policy, clock=clock)

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
        """The offer as a set that all equal recent offers share.

        Thousands of names take a MiB, and the planner reads each such set only once. Different offers share the strings
        of the names.
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
        """Whether kube-scheduler has offered nodes for a member, in a filter call."""
        return bool(self._known_of(gang).offers)

    def remove_gang(self, key: str) -> None:
        """Forget the gang: it is gone, or runs."""
        self._known.pop(key, None)
        self._reservation.remove_gang(key)

    def reset(self) -> None:
        """Forget the offers, drafts and searches of an earlier leader epoch."""
        self._known.clear()
        self._reservation.reset()

    def update_reservation(self, due: Sequence[Gang], now: float) -> bool:
        """Choose the gang for which cards are reserved. Returns whether formerly reserved cards are released.

        due: the gangs that have waited too long.
        """
        return self._reservation.update(due, self._policy, now)

    @property
    def half_reserved(self) -> bool:
        """Whether the next call of `update_reservation` continues a plan."""
        return self._reservation.is_half_planned

    # Plans.

    def plan_of(self, key: str) -> GangPlan:
        """A live view of the gang's plan. `key`: "namespace/name" of the gang."""
        return _Rows(self._reservations, key)

    def may_fit(self, gang: Gang, now: float) -> bool:
        """Whether to plan the gang: not shortly after a failed plan, and not if nothing has changed since."""
        record = self._known_of(gang)
        return now >= record.not_before and record.tried != self._plan_inputs(gang, now)

    def try_plan(self, gang: Gang, now: float) -> bool | None:
        """Plan all missing members, if they may fit.

        Returns whether all have places; None: the turn is over, and the next call continues the plan.
        """
        if not self.may_fit(gang, now):
            return False
        began, members = self._clock.cpu(), gang.missing_in_plan()
        record, state = self._known.setdefault(gang.key, _GangRecord()), self._plan_inputs(gang, now)
        inputs_seen: _PlanInputs | None = state
        short, complete = self.planner.find_unplaceable(members)
        if not complete:
            return None
        if short is not None:
            gang.reason = self._reservation.impossible_reason(gang) or no_place_text(short)
        else:
            draft = record.take_draft(members, state, Draft(self._clock.cpu, TURN_SECONDS))
            placed = self.place_members(gang, members, now, draft)
            if placed is None:
                record.draft = draft
                return None
            if placed:
                record.tried = None
                return True
            # The plan may not contain changes that happened after its first turn.
            inputs_seen = record.drafted if not draft.moved else None
        cost = self._clock.cpu() - began
        if cost > CHEAP:
            record.not_before = now + yielding.pause_seconds(cost)
        if (
            inputs_seen is None
            or record.tried is None
            or record.tried._replace(members=inputs_seen.members) != inputs_seen
        ):
            gang.mark_refused(now)  # not if only members have changed: adding members must bring no reservation sooner
        record.tried = inputs_seen
        return False

    def move_members(self, gang: Gang, uids: Iterable[str], now: float) -> bool:
        """Give these members of the plan other places, if that takes no longer than a turn. Returns whether they have
        them now.
        """
        return bool(
            self.place_members(gang, [gang.members[uid] for uid in uids], now, Draft(self._clock.cpu, TURN_SECONDS))
        )

    def place_members(self, gang: Gang, members: Sequence[Member], now: float, draft: Draft) -> bool | None:
        """Place all these members and reserve their cards. Replaces their former places in the gang's plan.

        If a member has no place, nothing changes. Returns whether all have places; None: the turn is over, and the next
        call continues the draft.
        """
        uids = [member.uid for member in members]
        for member in members:
            if self._reservations.known_binding(member.uid) is not None:
                gang.reason = f"an earlier Binding of {member.name} may still succeed; it is looked up first"
                return False
        _, _, created, _ = gang.rank()
        planned_gang = self.planned_gang(gang, now)
        holders = [uid for uid in uids if self._ledger.holding(uid) is not None]
        try:
            with self._ledger.what_if(released=holders), self._loads.what_if(unplanned=uids):
                outcome = self.planner.plan_beside_reserved(planned_gang, members, draft)
                later = (
                    self._nominator.later_nominations(gang.priority, created) if isinstance(outcome, Unplanned) else ()
                )
                if later:
                    with self._nominator.exclude_nominations(later):
                        planned_without = self.planner.plan_beside_reserved(planned_gang, members, draft)
                    if isinstance(planned_without, Planned):
                        self._nominator.release_overtaken(later, set(planned_without.nodes.values()), gang.namespace)
                        outcome = self.planner.plan_beside_reserved(planned_gang, members, draft)
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
                peers=member.request.peers if member.request is not None else "",
            )
        return True

    def planned_gang(self, gang: Gang, now: float) -> PlannedGang:
        """The data of the gang that a plan needs."""
        offers, avoided = self._known_of(gang).offers, gang.avoided_pairs(now)
        return PlannedGang(gang.namespace, gang.rank(), gang.priority, gang.members.keys(), offers, avoided)

    def invalid_part(self, gang: Gang) -> str | None:
        """A text for people about the first part of the plan that is no longer valid; None if the plan is valid."""
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

    def _plan_inputs(self, gang: Gang, now: float) -> "_PlanInputs":
        freed = self._cache.capacity.freed_count + self._loads.freed_count
        return _PlanInputs(freed, gang.changes, self._known_of(gang).changes, tuple(gang.avoided_pairs(now)))


class _PlanInputs(NamedTuple):
    """The state of the inputs of a plan. If two plans have equal inputs, and the first one failed, so will the second.

    freed: how many times capacity was freed.
    members, offers: how many times the gang's members, and its offers, have changed.
    avoided: pairs of a shape and a node that must not be used for the shape.
    """

    freed: int
    members: int
    offers: int
    avoided: tuple[tuple[str, str], ...]


@dataclass(slots=True, eq=False)
class _GangRecord:
    """The offers and the failed plan of one gang.

    offers: the nodes that kube-scheduler has offered, by shape.
    changes: how many times the offers have changed.
    tried: the inputs of the last failed plan; until `not_before` the gang is not planned again.
    draft: an unfinished plan for `members`, which takes several turns.
    drafted: the inputs when the draft was begun.
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

        The draft is removed from the record; the caller stores it again after a successful turn. So an exception leaves
        no half-changed draft.
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
