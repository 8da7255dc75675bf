"""Nodes and cards for members of gangs: the nodes that kube-scheduler has offered, failed attempts, and the plans that
reserve cards.

`gangs` decides when a gang is planned. A plan is one reservation in the phase WAITING for each member.

A gang is planned without the lock, on a snapshot. Then the plan is committed under the lock: `Commit` checks that
everything that the plan relies on is still true, and the cards of all members are reserved. On a conflict the gang is
planned again on a new snapshot, and after `_MAX_TRIES` conflicts once with the lock held, for `_LOCKED_SECONDS` at
most. Changes of the gang itself do not lead to that, since its owner decides how often it changes.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from sys import intern
from typing import Final, NamedTuple

from cardwise.clock import Clock
from cardwise.core.api.mpsprofile import COMMON_CLIENT
from cardwise.core.api.request import Load, PodRequest
from cardwise.core.gangs.gangplan import Pace, Planned, Unplanned
from cardwise.core.gangs.gangs import Member
from cardwise.core.gangs.gangstate import Gang, GangPlan
from cardwise.core.placement.holding import Holding
from extender.cache.cache import Cache
from extender.cache.clusterview import ClusterView, PodPlace
from extender.cache.commit import PODS_CHECK, Commit, PodPlan
from extender.cache.nominated import NominatedPods
from extender.cache.pacing import LOCKED_SECONDS, PlanningStopped, pause_seconds, stop_after_cpu
from extender.cache.pacing import Pace as ThreadPace
from extender.cache.reservations import Phase, Reservations
from extender.cache.statelock import StateLock
from extender.gangs.cardsearch import no_place_text
from extender.gangs.gangplanner import GangPlanner, GangToPlan
from extender.gangs.offers import OfferTable
from extender.gangs.reservation import GangReservation
from extender.nomination.nominator import Nominator
from extender.queue.searchpauses import MAX_PAUSE_SECONDS, SearchPauses
from extender.records.podref import PodRef

_MAX_OFFERS: Final = 32  # the most recent offers; a new offer that equals one of them shares its memory

_MAX_TRIES: Final = 3  # plans on snapshots, before a gang is planned with the lock held
_LOCKED_SECONDS: Final = 0.02  # seconds of CPU of a plan with the lock held, and of its commit
_COMMIT_SECONDS: Final = 0.00005  # seconds of CPU of a commit for each member
_ERROR_SECONDS: Final = 5.0  # seconds after an unexpected error, before the gang is planned again

CHEAP_PLAN_SECONDS = 0.002  # seconds: a plan that fails faster than this may be tried again at once


class _Outcome(Enum):
    """The outcome of a plan: it is reserved; there is none; the gang has changed; or something else has on which the
    plan depends.
    """

    DONE = auto()
    REFUSED = auto()
    GANG_CHANGED = auto()
    CONFLICT = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """A request to plan members of a gang. The callables are called under the lock.

    choose_members: returns the members to plan now; empty if the gang must wait.
    on_reserved: called when nodes and cards of these members are reserved.
    """

    gang: Gang
    choose_members: Callable[[], Sequence[Member]]
    on_reserved: Callable[[], None]


class _LaterNomination(NamedTuple):
    """The reservation of a nominated pod that comes later in the queue than a gang."""

    uid: str
    node: str
    namespace: str


class _SnapshotPlanner(NamedTuple):
    """A snapshot and its planner.

    freed: how many times capacity was freed before the snapshot; None if the snapshot must not be used again.
    """

    snapshot: ClusterView
    planner: GangPlanner
    freed: int | None


@dataclass(frozen=True, slots=True)
class _Task:
    """The input of one plan.

    former: the planner of an earlier plan; None if there is none.
    freed: how many times capacity was freed before the snapshot.
    inputs, record: the gang's plan inputs and record when the snapshot was taken.
    later: the reservations that the gang may overtake.
    closed_nodes: nodes that were closed since an earlier snapshot of the same plan.
    """

    gang: GangToPlan
    members: Sequence[Member]
    snapshot: ClusterView
    former: _SnapshotPlanner | None
    freed: int
    inputs: "_PlanInputs"
    record: "_GangRecord"
    later: Sequence[_LaterNomination]
    closed_nodes: frozenset[str]


class _PlanWithOvertaken(NamedTuple):
    """The result of a planner. `overtaken`: UIDs of nominated pods whose reservations the plan uses."""

    outcome: Planned | Unplanned
    overtaken: frozenset[str] = frozenset()


class GangPlaces:
    """The offers and plans of all gangs. Unless a method plans gangs, its caller holds the lock.

    policy: the placement policy of pods that name none.
    """

    def __init__(
        self,
        lock: StateLock,
        *,
        cache: Cache,
        nominated: NominatedPods,
        nominator: Nominator,
        policy: str,
        clock: Clock,
    ) -> None:
        self._lock = lock
        self._cache = cache
        self._ledger, self._loads = cache.ledger, cache.loads
        self._reservations = cache.reservations
        self._reservation = GangReservation(lock, cache, clock)
        self._nominated = nominated
        self._nominator = nominator
        self._policy = policy
        self._clock = clock
        self._known: dict[str, _GangRecord] = {}  # by gang
        self._offers = OfferTable()
        self._pauses = SearchPauses(clock)  # after long plans that failed
        self._recent_offers: dict[frozenset[str], frozenset[str]] = {}  # the latest at the end
        self._spare: _SnapshotPlanner | None = None  # the planner of the last plan, if no thread uses it

    # Offers of nodes.

    def add_offer(self, gang: Gang, shape: str, nodes: Collection[str]) -> None:
        """Record that kube-scheduler offers these nodes for a member of this shape."""
        offer = self._share_offer(nodes)
        record = self._known.setdefault(gang.key, _GangRecord())
        if self._offers.get(gang.key).get(shape) != offer:
            record.changes += 1
        self._offers.set(gang.key, shape, offer)
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
        if len(self._recent_offers) > _MAX_OFFERS:
            del self._recent_offers[next(iter(self._recent_offers))]
        return shared

    def has_offers(self, gang: Gang) -> bool:
        """Whether kube-scheduler has offered nodes for a member, in a filter call."""
        return bool(self._offers.get(gang.key))

    def remove_gang(self, key: str) -> None:
        """Forget the gang: it is gone, or runs."""
        self._known.pop(key, None)
        self._offers.remove(key)
        self._reservation.remove_gang(key)

    def reset(self) -> None:
        """Forget the offers and searches of an earlier leader epoch."""
        self._known.clear()
        self._offers.clear()
        self._reservation.reset()

    # The gang reservation. Called without the lock.

    def update_reservation(self, find_due: Callable[[], Sequence[Gang]], pace: Pace) -> None:
        """Choose the gang for which cards are reserved, and the cards; see `GangReservation.update_reservation`."""
        self._reservation.update_reservation(find_due, self._policy, pace)

    # Plans. Called without the lock, except for the methods with other notes.

    def plan_of(self, key: str) -> GangPlan:
        """A live view of the gang's plan. `key`: "namespace/name" of the gang. The caller holds the lock."""
        return _Rows(self._reservations, key)

    def may_fit(self, gang: Gang, now: float) -> bool:
        """Whether to plan the gang. After a failed plan, the gang must wait for a moment, and until something has
        changed. After a long one, its namespace pauses, except for gangs that are bound in part.

        The caller holds the lock.
        """
        if self._pauses.is_paused(gang.namespace) and not gang.forward:
            return False
        record = self._record_of(gang)
        return now >= record.not_before and record.tried != self._plan_inputs(gang, now)

    def try_plan(self, request: PlanRequest, pace: Pace) -> bool:
        """Plan the members if they may fit, and reserve their nodes and cards. Returns whether these are reserved now.

        pace: called in all loops of the planner; see `gangplan.plan`.
        """
        gang, began = request.gang, self._clock.cpu()
        with self._lock:
            if not self.may_fit(gang, self._clock.now()):
                return False
        outcome, task = self._place(request, pace)
        if outcome is _Outcome.REFUSED and task is not None:
            with self._lock:
                self._record_failure(gang, task, self._clock.cpu() - began)
        return outcome is _Outcome.DONE

    def record_error(self, gang: Gang) -> None:
        """Record that an unexpected error ended a plan of the gang. The gang is planned again after
        `_ERROR_SECONDS`.
        """
        with self._lock:
            gang.reason = "an unexpected error ended its plan; it is tried again"
            if gang.key in self._known:
                self._known[gang.key].not_before = self._clock.now() + _ERROR_SECONDS

    def move_members(self, request: PlanRequest, pace: Pace) -> bool:
        """Move members of the plan to other nodes or cards, all or none. Returns whether the members were moved."""
        return self._place(request, pace)[0] is _Outcome.DONE

    def _place(self, request: PlanRequest, pace: Pace) -> tuple[_Outcome, _Task | None]:
        """Plan the members, and replace their reservations.

        If a member does not fit, nothing changes. Also returns the last task; None if no members are to be planned.
        """
        closed_nodes = frozenset[str]()
        has_gang_changed = False
        for _ in range(_MAX_TRIES):
            with self._lock:
                task = self._begin(request, closed_nodes)
                if task is None:
                    return _Outcome.REFUSED, None
                if self._is_binding_known(request.gang, task.members):
                    self._spare = task.former
                    return _Outcome.REFUSED, task
            gang_plan = self._find_plan(task, pace)
            if isinstance(gang_plan.outcome, Planned):
                _prepare_checks(task.members, gang_plan.outcome, ThreadPace(self._clock))
            with self._lock:
                outcome = self._commit(request, task, gang_plan)
                closed_nodes |= self._closed_nodes(task, gang_plan)
            if outcome in (_Outcome.DONE, _Outcome.REFUSED):
                return outcome, task
            has_gang_changed |= outcome is _Outcome.GANG_CHANGED
        with self._lock:
            if has_gang_changed:
                request.gang.reason = "the gang changes faster than it is planned; it is tried again"
                return _Outcome.REFUSED, None
            task = self._begin(request, closed_nodes)
            if task is None:
                return _Outcome.REFUSED, None
            seconds = _LOCKED_SECONDS - _COMMIT_SECONDS * len(task.members)
            try:
                gang_plan = self._find_plan(task, stop_after_cpu(self._clock, seconds))
            except PlanningStopped:
                request.gang.reason = "the cluster changes faster than the gang is planned; it is tried again"
                return _Outcome.REFUSED, None
            return self._commit(request, task, gang_plan), task

    def _begin(self, request: PlanRequest, closed_nodes: frozenset[str]) -> _Task | None:
        """Take the snapshot for a plan; None if no members are to be planned. The caller holds the lock."""
        self._cache.sync_cards()
        gang, members, now = request.gang, request.choose_members(), self._clock.now()
        if not members:
            return None
        record, inputs = self._known.setdefault(gang.key, _GangRecord()), self._plan_inputs(gang, now)
        former, self._spare = self._spare, None
        freed = self._freed_count()
        is_current = (
            former is not None
            and former.freed == freed
            and former.snapshot.moment.nominations == self._cache.nominations.by_pod()
        )
        snapshot = former.snapshot if former is not None and is_current else self._cache.snapshot()
        _, _, created, _ = gang.rank()
        later = [
            _LaterNomination(row.pod.uid, row.node, row.pod.namespace)
            for row in self._nominator.later_nominations(gang.priority, created)
        ]
        gang_to_plan = self.make_gang_to_plan(gang, now)
        return _Task(gang_to_plan, members, snapshot, former, freed, inputs, record, later, closed_nodes)

    def _find_plan(self, task: _Task, pace: Pace) -> _PlanWithOvertaken:
        """Plan the members on the snapshot of the task."""
        if task.former is not None and task.former.snapshot is task.snapshot:
            planner = task.former.planner
        else:
            nominated = self._nominated.with_snapshot(task.snapshot)
            planner = (
                task.former.planner.move_to(task.snapshot, nominated)
                if task.former is not None
                else self.make_planner(task.snapshot, nominated)
            )
        freed: int | None = None
        try:
            gang_plan = _find_places(planner, task, pace)
            if isinstance(gang_plan.outcome, Unplanned):
                freed = task.freed
        finally:
            self._spare = _SnapshotPlanner(task.snapshot, planner, freed)
        return gang_plan

    # Everything below runs under the lock.

    def _is_binding_known(self, gang: Gang, members: Iterable[Member]) -> bool:
        for member in members:
            if self._reservations.known_binding(member.uid) is not None:
                gang.reason = f"an earlier Binding of {member.name} may still succeed; its outcome is looked up first"
                return True
        return False

    def _commit(self, request: PlanRequest, task: _Task, gang_plan: _PlanWithOvertaken) -> _Outcome:
        """Reserve the plan, if everything on which it depends is still true."""
        gang, outcome = request.gang, gang_plan.outcome
        if isinstance(outcome, Unplanned):
            gang.reason = self._reservation.impossible_reason(gang) or no_place_text(outcome.member)
            return _Outcome.REFUSED
        self._cache.sync_cards()
        _, _, created, _ = task.gang.rank
        overtaken = [
            row.pod.uid
            for row in self._nominator.later_nominations(task.gang.priority, created)
            if row.pod.uid in gang_plan.overtaken
        ]
        if len(overtaken) < len(gang_plan.overtaken):
            # kube-scheduler has called filter for a nominated pod since the plan, and now owns the reservation. No
            # check below would see that, because neither cards nor load of the node have changed.
            return _Outcome.CONFLICT
        uids = [member.uid for member in task.members]
        places = [
            PodPlace(
                PodRef(member.uid, task.gang.namespace, member.name),
                member.request,
                member.load,
                outcome.nodes[member.uid],
                outcome.assignments.get(member.uid),
            )
            for member in task.members
        ]

        def is_wanted() -> bool:
            return (
                gang.rank() == task.gang.rank
                and _needs(request.choose_members()) == _needs(task.members)
                and not self._is_binding_known(gang, task.members)
            )

        plan = PodPlan(
            task.snapshot,
            task.gang.namespace,
            places,
            is_wanted,
            replaced=[*uids, *overtaken],
            own_uids=task.gang.uids,
            rank=task.gang.rank,
            priority=task.gang.priority,
        )
        pace = stop_after_cpu(self._clock, LOCKED_SECONDS)
        conflict = Commit(self._cache, self._nominated, plan, pace).find_conflict()
        if conflict is not None:
            return _Outcome.GANG_CHANGED if conflict == PODS_CHECK else _Outcome.CONFLICT
        self._nominator.release_overtaken(overtaken)
        with self._reservations.restore_plans_on_error(uids):
            is_new = not gang.plan and not gang.forward
            self._reserve(gang, places)
            request.on_reserved()
            gang.mark_planned(uids, self._clock.now(), is_new=is_new)
        task.record.tried = None
        return _Outcome.DONE

    def _reserve(self, gang: Gang, places: Iterable[PodPlace]) -> None:
        """Reserve these places for members of the gang, in place of the reservations of their earlier plans."""
        for place in places:
            self._reservations.release_plan(place.pod.uid)
        for place in places:
            self._reservations.set_plan(
                place.pod,
                place.node,
                place.assignment,
                Phase.WAITING,
                mps_client=place.request.mps_client if place.request is not None else COMMON_CLIENT,
                load=place.load,
                gang=gang.key,
                peer_key=place.request.peer_key if place.request is not None else None,
            )

    def _closed_nodes(self, task: _Task, gang_plan: _PlanWithOvertaken) -> set[str]:
        """The nodes of the plan that were open in the snapshot, and are closed now."""
        if isinstance(gang_plan.outcome, Unplanned):
            return set()
        nodes = set(gang_plan.outcome.nodes.values())
        return {node for node in nodes if task.snapshot.loads.is_open(node) and not self._loads.is_open(node)}

    def _record_failure(self, gang: Gang, task: _Task, cost: float) -> None:
        """Record that the plan of the gang failed. `cost`: seconds of CPU."""
        record, inputs, now = task.record, task.inputs, self._clock.now()
        if cost > CHEAP_PLAN_SECONDS:
            record.not_before = now + pause_seconds(cost)
        pause_end = self._pauses.charge_search(gang.namespace, cost)
        if pause_end is not None:
            # The gang waits longer than its namespace, so that each other gang of the namespace has its turn.
            prefix = f"{gang.namespace}/"
            waiting = sum(key.startswith(prefix) and other.not_before > now for key, other in self._known.items())
            record.not_before = now + min(MAX_PAUSE_SECONDS, (pause_end - now) * (2 + waiting))
        if record.tried is None or record.tried._replace(members=inputs.members) != inputs:
            gang.mark_refused(now)  # not if only members have changed: adding members must bring no reservation sooner
        record.tried = inputs

    def make_gang_to_plan(self, gang: Gang, now: float) -> GangToPlan:
        """The data of the gang that a plan needs."""
        offers, avoided = dict(self._offers.get(gang.key)), frozenset(gang.avoided_pairs(now))
        keys = {member.request.peer_key for member in gang.members.values() if member.request is not None}
        peer_nodes = {key: self._reservations.peer_nodes(key) for key in keys if key is not None}
        return GangToPlan(
            gang.namespace, gang.rank(), gang.priority, frozenset(gang.members), offers, avoided, peer_nodes
        )

    def make_planner(self, snapshot: ClusterView, nominated: NominatedPods) -> GangPlanner:
        """A planner on the snapshot of a caller without the lock."""
        return GangPlanner(snapshot, nominated, policy=self._policy)

    def invalid_part(self, gang: Gang) -> str | None:
        """A text for people about a part of the plan that is no longer valid; None if the plan is valid."""
        holdings: list[Holding] = []
        for uid, node in gang.plan.items():
            member, holding = gang.members[uid], self._ledger.holding(uid)
            is_valid = self._loads.free_load(node) is not None
            if is_valid and member.request is not None:
                is_valid = holding is not None and self._cache.are_planned_cards_valid(holding, member.request)
            if not is_valid:
                return _unavailable_text(member, node)
            if holding is not None and member.request is not None:
                holdings.append(holding)
        excess = self._cache.first_beyond_quotas(holdings)
        return _unavailable_text(gang.members[excess.uid], excess.node) if excess is not None else None

    def _record_of(self, gang: Gang) -> "_GangRecord":
        return self._known.get(gang.key, _EMPTY_RECORD)

    def _plan_inputs(self, gang: Gang, now: float) -> "_PlanInputs":
        offers, avoided = self._record_of(gang).changes, tuple(gang.avoided_pairs(now))
        return _PlanInputs(self._freed_count(), gang.changes, offers, avoided)

    def _freed_count(self) -> int:
        return self._cache.capacity.freed_count + self._loads.freed_count


class _PlanInputs(NamedTuple):
    """The versions of the inputs of a plan. If a plan has failed, another plan with equal inputs would fail too.

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

    changes: how many times the offers have changed.
    tried: the inputs of the last failed plan. The gang is not planned again before `not_before`.
    """

    changes: int = 0
    tried: _PlanInputs | None = None
    not_before: float = float("-inf")


_EMPTY_RECORD: Final = _GangRecord()


def _unavailable_text(member: Member, node: str) -> str:
    return f"the GPUs planned for {member.name} on node {node} are no longer available"


def _needs(members: Iterable[Member]) -> list[tuple[str, str, PodRequest | None, Load]]:
    """The properties of these members on which a plan depends."""
    return [(member.uid, member.shape, member.request, member.load) for member in members]


def _find_places(planner: GangPlanner, task: _Task, pace: Pace) -> _PlanWithOvertaken:
    """A plan for the members. If necessary, it uses cards that are reserved for nominated pods later in the queue."""
    gang, members, ledger, loads = task.gang, task.members, task.snapshot.ledger, task.snapshot.loads

    def plan() -> Planned | Unplanned:
        return planner.plan(gang, members, pace, without=task.closed_nodes)

    @contextmanager
    def exclude(uids: Sequence[str]) -> Iterator[None]:
        held = [uid for uid in uids if ledger.holding(uid) is not None]
        with ledger.what_if(released=held), loads.what_if(unplanned=uids):
            yield

    with exclude([member.uid for member in members]):
        short = planner.find_unplaceable_member(members, pace)
        if short is not None:
            return _PlanWithOvertaken(Unplanned(member=short))
        outcome = plan()
        if isinstance(outcome, Planned) or not task.later:
            return _PlanWithOvertaken(outcome)
        with exclude([nomination.uid for nomination in task.later]):
            outcome_without = plan()
        if isinstance(outcome_without, Unplanned):
            return _PlanWithOvertaken(outcome)
        nodes, has_quota = set(outcome_without.nodes.values()), task.snapshot.limits.has_quota(gang.namespace)
        overtaken = [
            nomination.uid
            for nomination in task.later
            if nomination.node in nodes or (has_quota and nomination.namespace == gang.namespace)
        ]
        with exclude(overtaken):
            return _PlanWithOvertaken(plan(), frozenset(overtaken))


def _prepare_checks(members: Iterable[Member], planned: Planned, pace: ThreadPace) -> None:
    """Compute what the checks of the plan read under the lock. The assignments store it."""
    for member in members:
        pace.pause()  # only sleeps: a complete plan is worth its commit, even if the planner's time is over
        assignment = planned.assignments.get(member.uid)
        if assignment is not None and member.request is not None:
            assignment.card_uses()
            assignment.card_demands(member.request.containers)


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
