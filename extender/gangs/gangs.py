"""The gangs of the cluster: what filter and bind decide about members, and the periodic work of gangs.

This module belongs to the state and uses its lock in short critical sections. Gangs are planned without the lock
(`gangplaces`).
`cardwise.core.gangs.gangstate` has the phase of one gang. No code here waits: a bind waits on a `Permit`.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Final

import structlog

from cardwise.clock import Clock
from cardwise.core.gangs.gangplan import Pace as PlanPace
from cardwise.core.gangs.gangs import ForeignPodGroup, GangPhase, Member, PodGroupSpec, Rank
from cardwise.core.gangs.gangstate import Gang
from cardwise.core.values.refusals import Refusal
from extender.cache.cache import Cache
from extender.cache.pacing import LOCKED_SECONDS, Pace, PlanningStopped, pause, pause_seconds, stop_after_cpu, stop_when
from extender.cache.statelock import StateLock
from extender.gangs.bindthreads import BindThreadAdmission
from extender.gangs.gangplaces import CHEAP_PLAN_SECONDS, GangPlaces, PlanRequest
from extender.gangs.gangqueue import GangCursor, GangQueue
from extender.gangs.gangtypes import (
    BindNow,
    BindRefused,
    DueWork,
    GangSettings,
    MemberPlace,
    Permit,
    PermitAnswer,
    PlacedAlone,
    PlannedNode,
)
from extender.gangs.gangviews import GangView, make_view, pod_ref
from extender.gangs.reservation import select_due
from extender.queue.searchpauses import PAUSE_FACTOR

_log = structlog.get_logger(__name__)

_STEP_SECONDS: Final = 1.0  # the seconds after which a step begins no further plan; the next step continues
# Maximum CPU seconds for plans in one filter call. kube-scheduler waits for the call, and the controller plans the
# rest.
_CALL_SECONDS: Final = 0.02
# Seconds within which two filter calls for a pod belong to the same attempt; kube-scheduler's back-off is at least as
# long.
_TRY_SECONDS: Final = 1.0
_RECOVER_SECONDS: Final = 3.0  # maximum seconds of planning before a leader epoch begins; the rest follows later


class Gangs:
    """All gangs. Any thread may call the methods, except under headings that say that the caller holds the lock.

    on_permit_ended: called for metrics when a permit ends, with "bound" or "released" and the permit's seconds.
    on_binding_started: called for metrics when the binding of a gang starts, with the creationTimestamp of its oldest
        member.
    """

    def __init__(
        self, lock: StateLock, *, cache: Cache, places: GangPlaces, settings: GangSettings, clock: Clock
    ) -> None:
        self.on_permit_ended: Callable[[str, float], None] = lambda _outcome, _seconds: None
        self.on_binding_started: Callable[[str], None] = lambda _created: None
        self._lock = lock
        self._cache = cache
        self._queue = cache.queue
        self._reservations = cache.reservations
        self._settings = settings
        self._clock = clock
        self._gangs: dict[str, Gang] = {}
        self._gang_keys: dict[str, str] = {}  # by member UID, the key of the gang
        self._groups: dict[str, PodGroupSpec] = {}
        self._foreign_podgroups: dict[tuple[ForeignPodGroup, str], PodGroupSpec] = {}
        self._cardless: Counter[str] = Counter()  # by gang of a PodGroup of Kubernetes, its pods without cards
        self._cardless_gangs: dict[str, str] = {}  # by pod without cards, the key of its gang
        self._permits: dict[str, Permit] = {}
        self._gang_queue = GangQueue()
        self._pass: Iterator[Gang] | None = None  # the gangs that are still to be planned in this pass
        self._pass_cost = 0.0
        self._next_pass = float("-inf")
        self._next_in_call = float("-inf")  # the earliest time at which a filter call plans again
        self._first_call = "", float("-inf")  # the last call that offered only the nominated node: its pod and time
        self._bind_admission = BindThreadAdmission(settings.max_waiting)
        self._due_gangs: list[Gang] = []  # the result of `select_due` at the last step
        self._places = places
        self._stopped: str | None = None

    # Objects of the API server. For pods the caller holds the lock.

    def set_member(self, key: str, member: Member) -> None:
        """Update a member of the gang `key`, "namespace/name". Call this before the member's reservation is changed."""
        now = self._clock.now()
        before = self._gang_keys.get(member.uid)
        if before is not None and before != key:
            self.remove_pod(member.uid)
        gang = self._gangs.get(key)
        if gang is None:
            namespace, _, name = key.partition("/")
            gang = self._gangs[key] = Gang(namespace, name, self._places.plan_of(key), self._settings.patience)
            gang.since = now
        self._gang_keys[member.uid] = key
        was_complete, was_running = gang.complete, gang.ran
        self._update_group(gang, member)
        self._after_transition(gang, gang.set_member(member, now))
        self._reset_if_abandoned(gang, now)
        if gang.ran > was_running:
            self._places.remove_gang(key)
        # kube-scheduler may have called filter for the pod before the watch has shown it.
        came_late = before is None and self._queue.is_unschedulable(member.uid)
        if gang.complete > was_complete or gang.ran > was_running or came_late:
            self._queue.requeue_all()

    def remove_pod(self, uid: str) -> None:
        """Remove a member: the pod is gone, or is no longer in a gang. Call this before its reservation is changed."""
        key = self._gang_keys.pop(uid, None)
        if key is None:
            return
        gang, now = self._gangs[key], self._clock.now()
        self._after_transition(gang, gang.remove_member(uid, now))
        self._reset_if_abandoned(gang, now)
        if not gang.members:
            del self._gangs[key]
            self._gang_queue.remove_gang(key)
            self._places.remove_gang(key)

    def set_group(self, key: str, group: PodGroupSpec | None) -> None:
        """Update the PodGroup of Cardwise with this `key`, "namespace/name"; None: the PodGroup is gone."""
        with self._lock:
            if group is None:
                self._groups.pop(key, None)
            else:
                self._groups[key] = group
            self._on_group_changed(key)

    def set_foreign_group(self, kind: ForeignPodGroup, key: str, group: PodGroupSpec | None) -> None:
        """As `set_group`, for a PodGroup of another API group."""
        with self._lock:
            if group is None:
                self._foreign_podgroups.pop((kind, key), None)
            else:
                self._foreign_podgroups[kind, key] = group
            self._on_group_changed(key)

    def set_cardless_member(self, pod: str, key: str | None) -> None:
        """Update a pod that requests no cards and belongs to a PodGroup of Kubernetes.

        pod: a unique key of the pod.
        key: "namespace/name" of the gang; None if the pod is in no PodGroup or is gone.
        """
        before = self._cardless_gangs.pop(pod, None)
        if key is not None:
            self._cardless_gangs[pod] = key
        if before == key:
            return
        for gang_key, change in ((before, -1), (key, 1)):
            if gang_key is not None:
                self._cardless[gang_key] += change
                self._on_group_changed(gang_key)
        if before is not None and not self._cardless[before]:
            del self._cardless[before]

    # Calls of filter and bind.

    def filter_member(self, uid: str, nodes: Collection[str], named_node: str | None = None) -> MemberPlace:
        """Place a member of a gang, or refuse it.

        nodes: the nodes that kube-scheduler offers.
        named_node: the node in the pod's status; None for none.
        """
        with self._lock:
            self._cache.sync_cards()
            now = self._clock.now()
            gang = self.gang_of(uid)
            if gang is None:
                self._queue.mark_refused(uid)
                return Refusal.GANG_INCOMPLETE  # the watch has not shown the pod yet
            if gang.ran:
                return PlacedAlone()
            first = self._is_first_call(uid, nodes, named_node, now)
            self._record_call(gang, uid, nodes, first=first)
            refusal = gang.refusal(now) if not gang.plan and not gang.forward else None
            if refusal is not None:
                return self._answer_member(gang, uid, refusal)
            needs_plan = (not gang.plan and not gang.forward) or (
                gang.forward and gang.members[uid] in gang.missing_in_plan()
            )
        if needs_plan:
            self._plan_in_call(gang)
        with self._lock:
            place = self._planned_place(gang, uid, nodes, first=first)
            if place is None:
                gang.avoid_node(uid, gang.plan[uid], self._clock.now())
        return place if place is not None else self._move_in_call(gang, uid, nodes)

    def request_permit(self, uid: str, node: str) -> PermitAnswer:
        """Handle a bind call. For a member of a gang that is not bound yet, returns the permit to wait for."""
        with self._lock:
            self._cache.sync_cards()
            now = self._clock.now()
            gang = self.gang_of(uid)
            if gang is None or gang.ran:
                return BindNow()
            if gang.plan.get(uid) != node:
                return BindRefused("the plan of the pod's gang has changed; the pod is tried again")
            if gang.forward:
                return BindNow()
            if self._stopped is not None:
                return BindRefused(self._stopped)
            name = gang.members[uid].name
            if uid in gang.arrived:
                self._end_plan(gang, f"kube-scheduler called bind twice for {name}")
                return BindRefused("the plan of the pod's gang was cancelled; the pod is tried again")
            permit = self._permits[gang.key]
            if gang.mark_arrived(uid, now):
                self._allow_permit(gang, permit, now)
            return permit

    def must_wait(self, uid: str) -> bool:
        """Whether a bind of this pod would have to wait for other members."""
        with self._lock:
            gang = self.gang_of(uid)
            return gang is not None and not gang.ran and not gang.forward and len(gang.plan) > 1

    def cancel_permit(self, permit: Permit, reason: str) -> None:
        """Cancel the permit, unless it is decided already. Called when a waiting bind call was closed or has timed
        out.
        """
        with self._lock:
            if self._permits.get(permit.key) is permit:
                self._end_plan(self._gangs[permit.key], reason)

    # For the state and preemption. The caller holds the lock.

    def gang_of(self, uid: str) -> Gang | None:
        """The gang of the pod; None if the pod is in no gang."""
        return self._gangs.get(self._gang_keys.get(uid, ""))

    def may_bind(self, uid: str, node: str) -> bool:
        """Whether a Binding of this pod may be posted now. A pod with a gang waits until the gang is being bound."""
        gang = self.gang_of(uid)
        return gang is None or gang.ran or (gang.forward and gang.plan.get(uid) == node)

    def mark_posted(self, uid: str) -> None:
        """Record that a member is bound, or may be bound, by its Binding."""
        gang = self.gang_of(uid)
        if gang is not None:
            gang.mark_posted(uid, self._clock.now())

    def mark_unposted(self, uid: str) -> None:
        """Record that certainly no Binding has bound the member, or that the member was removed from the plan."""
        gang = self.gang_of(uid)
        if gang is not None:
            self._reset_if_abandoned(gang, self._clock.now())

    def reset(self) -> None:
        """Forget all data that are not from the API server, because the leader changes."""
        now = self._clock.now()
        for gang in list(self._gangs.values()):
            self._after_transition(gang, gang.reset_to_cluster(now))
        self._places.reset()

    # Timeouts, and changes of the leader.

    def plan_partly_bound_gangs(self) -> None:
        """Begin a leader epoch: plan the gangs that are bound in part before anything else is placed."""
        with self._lock:
            now, wall = self._clock.now(), self._clock.wall().timestamp()
            for gang in self._gangs.values():
                gang.adopt(now, wall)
            gangs = self._gang_queue.gangs_in_order()
        until = self._clock.now() + _RECOVER_SECONDS
        pace = self._make_pace(lambda: self._clock.now() >= until)

        def choose_members(gang: Gang) -> Sequence[Member]:
            return gang.missing_in_plan() if gang.forward and self._gangs.get(gang.key) is gang else ()

        with suppress(PlanningStopped):
            for gang in self._select(gangs, choose_members, pace):
                request = PlanRequest(gang=gang, choose_members=partial(choose_members, gang), on_reserved=lambda: None)
                self._try_plan(request, pace)

    def cancel_permits(self, reason: str) -> None:
        """Cancel all permits; from now on no bind may wait."""
        with self._lock:
            self._stopped = reason

        def cancel(gang: Gang) -> None:
            if gang.key in self._permits:
                self._end_plan(gang, reason)

        self._visit_gangs(cancel)

    def step(self) -> DueWork:
        """Do the periodic work of the gangs. Only the leader calls this. Returns the due writes."""
        work, due = DueWork([], []), list[tuple[Rank, Gang]]()

        def advance(gang: Gang) -> None:
            try:
                self._advance_gang(gang, work, due)
            except Exception:  # noqa: BLE001 - an unexpected gang must not stop the work of other gangs
                _log.exception("failed to do the periodic work of a gang; trying again", gang=gang.key)

        self._visit_gangs(advance)
        self._due_gangs = select_due(due)
        return work

    def plan_waiting(self) -> None:
        """Search cards for one gang that has waited too long, then plan the gangs in the queue. Call this after `step`.

        A search may take long, so the time limit of the plans begins after it.
        """
        pace = self._make_pace()

        def find_due() -> list[Gang]:
            now = self._clock.now()
            return [gang for gang in self._due_gangs if gang.is_reservation_due(now)]

        with suppress(PlanningStopped):
            self._places.update_reservation(find_due, pace)
            self._plan_queue(pace)

    def must_evict(self, uid: str) -> bool:
        """Whether the member must still be evicted."""
        with self._lock:
            gang = self.gang_of(uid)
            return gang is not None and uid in gang.evicting

    def must_ungate(self, uid: str) -> bool:
        """Whether the member's gate must still be removed."""
        with self._lock:
            gang = self.gang_of(uid)
            return gang is not None and gang.must_ungate(uid)

    # For people and metrics.

    def views(self) -> list[GangView]:
        """Views of all gangs, for PodGroups and events."""
        views: list[GangView] = []

        def add_view(gang: Gang) -> None:
            if not gang.group.basic:
                views.append(make_view(gang, self._cache.ledger))

        self._visit_gangs(add_view)
        return views

    def phase_counts(self) -> dict[str, int]:
        """The number of gangs by phase."""
        counts = dict.fromkeys(map(str, GangPhase), 0)

        def count_phase(gang: Gang) -> None:
            counts[str(gang.phase)] += not gang.group.basic

        self._visit_gangs(count_phase)
        return counts

    def foreign_groups(self) -> list[tuple[ForeignPodGroup, str]]:
        """The kinds and keys of the PodGroups of other API groups that have the minimum of a gang."""
        groups: list[tuple[ForeignPodGroup, str]] = []
        self._visit_gangs(lambda gang: groups.extend((kind, gang.key) for kind in gang.foreign_podgroups))
        return groups

    # Work without the lock, which takes the lock for short critical sections.

    def _visit_gangs(self, visit: Callable[[Gang], None]) -> None:
        """Call `visit` for each gang, under the lock. Releases the lock from time to time."""
        with self._lock:
            keys = list(reversed(self._gangs))
        while keys:
            with self._lock:
                self._cache.sync_cards()
                until = self._clock.cpu() + LOCKED_SECONDS
                while keys:
                    gang = self._gangs.get(keys.pop())
                    if gang is not None:
                        visit(gang)
                    if self._clock.cpu() >= until:
                        break
            if keys:
                pause(self._clock)

    def _select(self, gangs: GangCursor, is_selected: Callable[[Gang], object], pace: PlanPace) -> Iterator[Gang]:
        """The gangs for which `is_selected`, called under the lock, is true. Yields gangs without the lock."""
        while True:
            selected: Gang | None = None
            with self._lock:
                until = self._clock.cpu() + LOCKED_SECONDS
                while selected is None and (gang := gangs.gang) is not None and self._clock.cpu() < until:
                    gangs.advance()
                    if is_selected(gang):
                        selected = gang
                is_last = gangs.gang is None
            if selected is not None:
                yield selected
            elif is_last:
                return
            pace()

    def _gangs_to_plan(self, gangs: GangCursor, pace: PlanPace, last: Gang | None = None) -> Iterator[Gang]:
        """The given gangs that may fit now, in order, and then the gang `last`.

        The caller plans each gang before it takes the next one. Leaves out gangs for which nothing has changed since
        their last failed plan.

        If kube-scheduler has not called filter for a gang, it is unknown which nodes the gang may use. Such a gang is
        returned only immediately before the next gang that may be planned. So it keeps its position in the order.
        """
        unoffered: list[Gang] = []

        def may_be_planned(gang: Gang) -> bool:
            now = self._clock.now()
            if gang.forward:
                return self._is_ready(gang, now) and bool(gang.missing_in_plan())
            if not self._wants_plan(gang, now):
                return False
            if not self._places.has_offers(gang):
                unoffered.append(gang)
                return False
            return self._places.may_fit(gang, now)

        def take_unoffered() -> list[Gang]:
            with self._lock:
                now = self._clock.now()
                # Meanwhile a gang may have gone, lost a member, or got a plan.
                gangs_in_order = [gang for gang in unoffered if self._wants_plan(gang, now)]
            unoffered.clear()
            return gangs_in_order

        for gang in self._select(gangs, may_be_planned, pace):
            if not gang.forward:
                yield from take_unoffered()
            yield gang
        if last is not None:
            with self._lock:
                may_fit = self._places.may_fit(last, self._clock.now())
            if may_fit:
                yield from take_unoffered()
                yield last

    def _plan_queue(self, pace: PlanPace) -> None:
        """Plan the gangs in the queue, for about `_STEP_SECONDS`. The next call continues the pass."""
        until = self._clock.now() + _STEP_SECONDS
        while self._clock.now() < until:
            if self._pass is None:
                if self._clock.now() < self._next_pass:
                    return
                with self._lock:
                    self._cache.sync_cards()
                    gangs = self._gang_queue.gangs_in_order()
                self._pass, self._pass_cost = self._gangs_to_plan(gangs, pace), 0.0
            began = self._clock.cpu()
            gang = next(self._pass, None)
            if gang is not None:
                self._plan_gang(gang, pace)
            self._pass_cost += self._clock.cpu() - began
            if gang is None:
                self._pass = None
                if self._pass_cost > CHEAP_PLAN_SECONDS:
                    self._next_pass = self._clock.now() + pause_seconds(self._pass_cost)
                return

    def _plan_in_call(self, gang: Gang) -> None:
        """Plan the gang in a filter call, after the gangs that come before it.

        kube-scheduler places one pod after another, so all other pods wait for this call, even pods without a GPU. Each
        member of the gang causes a call. So a call plans only if the gang may fit, and for at most `_CALL_SECONDS`.
        After a call whose plan failed, no call plans for ten times the duration of that plan. Meanwhile `plan_waiting`
        plans in the background; once it has a plan, it requeues the members.
        """
        with self._lock:
            now = self._clock.now()
            if self._gangs.get(gang.key) is not gang or gang.ran:
                return
            if now < self._next_in_call or not self._places.may_fit(gang, now):
                gang.reason = gang.reason or "gangs are being planned"
                return
            gangs = GangCursor(iter(())) if gang.forward else self._gang_queue.gangs_before(gang)
        began, is_planned, pace = self._clock.cpu(), False, stop_after_cpu(self._clock, _CALL_SECONDS)
        gang_to_plan: Gang | None = None
        try:
            for gang_to_plan in self._gangs_to_plan(gangs, pace, last=gang):
                pace()
                is_planned = self._plan_gang(gang_to_plan, pace, may_raise=gang_to_plan is gang)
        except PlanningStopped:
            is_planned = False
            gang.reason = (
                "gangs are being planned" if gang_to_plan is gang else "gangs that come before it are being planned"
            )
        with self._lock:
            cost = self._clock.cpu() - began
            if not (is_planned and gang_to_plan is gang) and cost > CHEAP_PLAN_SECONDS:
                self._next_in_call = now + PAUSE_FACTOR * cost

    def _move_in_call(self, gang: Gang, uid: str, nodes: Collection[str]) -> MemberPlace:
        """Plan the member on another node in a filter call, because kube-scheduler does not offer its planned node."""
        pace = stop_after_cpu(self._clock, _CALL_SECONDS)
        self._move_members(gang, lambda: [uid], pace)
        with self._lock:
            place = self._planned_place(gang, uid, nodes)
            if place is None and gang.forward:
                gang.unplan(uid)
                place = self._answer_member(gang, uid, Refusal.GANG_WAITS)
        if place is not None:
            return place

        def movable_uids() -> list[str]:
            # Other members that have passed filter are not moved: kube-scheduler may be about to call bind for them.
            uids = [member_uid for member_uid in gang.plan if member_uid == uid or member_uid not in gang.passed]
            return uids if len(uids) > 1 else []

        is_moved = self._move_members(gang, movable_uids, pace)
        with self._lock:
            if is_moved:
                self._requeue_members(gang)
            place = self._planned_place(gang, uid, nodes)
            if place is None:
                node, name = gang.plan[uid], gang.members[uid].name
                self._end_plan(gang, f"kube-scheduler did not offer node {node} for {name}")
                place = self._answer_member(gang, uid, Refusal.GANG_WAITS)
            return place

    def _move_members(self, gang: Gang, choose_uids: Callable[[], Sequence[str]], pace: PlanPace) -> bool:
        """Move members of the plan to other nodes or cards, if that takes no longer than a call may take.

        Returns whether the members were moved.
        """

        def choose_members() -> list[Member]:
            if self._gangs.get(gang.key) is not gang or gang.ran:
                return []
            return [gang.members[uid] for uid in choose_uids() if uid in gang.plan]

        request = PlanRequest(gang=gang, choose_members=choose_members, on_reserved=lambda: None)
        try:
            return self._places.move_members(request, pace)
        except PlanningStopped:
            return False

    def _plan_gang(self, gang: Gang, pace: PlanPace, *, may_raise: bool = False) -> bool:
        """Plan the gang if it may fit now, and requeue its refused members. Returns whether the gang has a plan now.

        may_raise: whether to raise unexpected errors instead of logging them, because the call is for this gang.
        """
        request = PlanRequest(
            gang=gang,
            choose_members=partial(self._members_to_plan, gang),
            on_reserved=partial(self._on_planned, gang),
        )
        return self._places.try_plan(request, pace) if may_raise else self._try_plan(request, pace)

    def _try_plan(self, request: PlanRequest, pace: PlanPace) -> bool:
        """As `GangPlaces.try_plan`, but an unexpected error is logged, and the gang is tried again later."""
        try:
            return self._places.try_plan(request, pace)
        except PlanningStopped:
            raise
        except Exception:  # noqa: BLE001 - an unexpected gang must not stop the plans of other gangs
            _log.exception("failed to plan a gang; trying again", gang=request.gang.key)
            self._places.record_error(request.gang)
            return False

    def _make_pace(self, is_over: Callable[[], bool] = lambda: False) -> PlanPace:
        """The pace of a plan in the background."""
        return stop_when(Pace(self._clock, lambda: self._stopped is not None or is_over()).pause)

    # Everything below runs under the lock.

    def _advance_gang(self, gang: Gang, work: DueWork, due: list[tuple[Rank, Gang]]) -> None:
        """Do the periodic work of this gang.

        work: receives the due writes.
        due: receives the gang with its rank if cards should be reserved for it, because it has waited too long.
        """
        now = self._clock.now()
        expiry = gang.expiry_reason(
            now, others_short=bool(gang.plan) and self._bind_admission.are_others_short(gang.namespace, now)
        )
        if expiry:
            self._end_plan(gang, expiry)
        if gang.rollback_due(now):
            self._after_transition(gang, gang.begin_rollback(now))
        work.ungate.extend(pod_ref(gang, member) for member in gang.members_to_ungate())
        work.evict.extend((pod_ref(gang, gang.members[uid]), gang.reason) for uid in gang.evicting)
        if gang.is_reservation_due(now):
            due.append((gang.rank(), gang))

    def _is_first_call(self, uid: str, nodes: Collection[str], named_node: str | None, now: float) -> bool:
        """Whether this is the first filter call of an attempt, in which kube-scheduler offers only the nominated node.

        Such a call does not show whether the pod may use other nodes. The second call of the attempt offers all nodes
        that the pod may use. If it offers only the same node again, the pod may use no other node.
        """
        before, self._first_call = self._first_call, ("", float("-inf"))
        if list(nodes) != [named_node] or (before[0] == uid and now - before[1] < _TRY_SECONDS):
            return False
        self._first_call = uid, now
        return True

    def _record_call(self, gang: Gang, uid: str, nodes: Collection[str], *, first: bool) -> None:
        """Record that kube-scheduler calls filter for the member."""
        member = gang.members[uid]
        gang.mark_requested(uid)
        if not first and list(nodes) != [self._reservations.nominations.nominated_node(uid)]:
            self._places.add_offer(gang, member.shape, nodes)
        if uid in gang.arrived and not gang.forward:
            self._end_plan(gang, f"kube-scheduler scheduled {member.name} again while it waited in bind")

    def _planned_place(
        self, gang: Gang, uid: str, nodes: Collection[str], *, first: bool = False
    ) -> MemberPlace | None:
        """The answer to filter for the member; None if kube-scheduler does not offer the member's planned node."""
        if self.gang_of(uid) is not gang:
            self._queue.mark_refused(uid)
            return Refusal.GANG_INCOMPLETE  # the pod was deleted since the call began
        if gang.ran:
            return PlacedAlone()
        node = gang.plan.get(uid)
        if node is None:
            waits = not gang.plan if not gang.forward else gang.members[uid] in gang.members_to_plan()
            return self._answer_member(gang, uid, Refusal.GANG_WAITS if waits else Refusal.GANG_FOLLOWS)
        if node in nodes:
            return self._answer_member(gang, uid, PlannedNode(node))
        if first:
            return self._answer_member(gang, uid, Refusal.GANG_WAITS)
        if self._reservations.known_binding(uid) is not None:
            # The member may be bound to its planned node already.
            return self._answer_member(gang, uid, Refusal.GANG_BACKS_OFF)
        return None

    def _answer_member(self, gang: Gang, uid: str, place: PlannedNode | Refusal) -> MemberPlace:
        """Record the answer to filter for the member. Returns the answer."""
        if isinstance(place, Refusal):
            self._queue.mark_refused(uid, awaits_plan=gang.priority if self._awaits_plan(gang, uid) else None)
        else:
            self._queue.mark_placed(uid)
            gang.mark_permitted(uid, self._clock.now())
        return place

    def _awaits_plan(self, gang: Gang, uid: str) -> bool:
        """Whether the planner will requeue this refused member once the gang fits. Then no other event needs to requeue
        it.

        The planner will not requeue the member if it is in the plan, if kube-scheduler may have offered only a
        nominated node, or if kube-scheduler has offered no nodes for the gang yet.
        """
        nominated = self._reservations.nominations.nominated_node(uid)
        return uid not in gang.plan and not nominated and self._places.has_offers(gang)

    def _is_ready(self, gang: Gang, now: float) -> bool:
        """Whether the gang exists, and may be planned now."""
        return self._gangs.get(gang.key) is gang and gang.refusal(now) is None

    def _wants_plan(self, gang: Gang, now: float) -> bool:
        """Whether the gang may be planned now, has no plan and does not run."""
        return self._is_ready(gang, now) and not (gang.ran or gang.forward or gang.plan or gang.has_gated_member)

    def _members_to_plan(self, gang: Gang) -> Sequence[Member]:
        """The members to plan now; none if the gang must not be planned."""
        now = self._clock.now()
        if self._gangs.get(gang.key) is not gang or gang.ran:
            return ()
        if gang.forward:
            return gang.missing_in_plan()
        if gang.plan or gang.refusal(now) is not None:
            return ()
        if not self._queue.may_place(gang.priority):
            gang.reason = "pods of higher priority come first; their last attempt reached no extender"
            return ()
        refusal = self._bind_admission.refusal_reason(gang, self._occupied_threads(), now)
        if refusal is not None:
            gang.reason = refusal
            return ()
        return gang.missing_in_plan()

    def _on_planned(self, gang: Gang) -> None:
        """Record that nodes and cards are reserved for the missing members, and requeue the refused members."""
        self._requeue_members(gang)
        if not gang.forward:
            now = self._clock.now()
            self._bind_admission.mark_admitted(gang, now)
            self._permits[gang.key] = Permit(gang.key, now)  # last: after an error there is no plan and no permit

    def _requeue_members(self, gang: Gang) -> None:
        """Requeue the members that were refused before the gang had a plan."""
        if any(map(self._queue.is_unschedulable, gang.plan)):
            self._queue.requeue_all()

    def _occupied_threads(self) -> int:
        """The number of threads in which members of planned gangs wait or may wait."""
        return sum(len(self._gangs[key].plan) - 1 for key in self._permits)

    def _allow_permit(self, gang: Gang, permit: Permit, now: float) -> None:
        """Allow the gang's permit if the whole plan is still valid. Called when the last member has reached bind."""
        invalid_part = self._places.invalid_part(gang)
        if invalid_part is not None:
            self._end_plan(gang, invalid_part)
            return
        gang.commit(now)
        self._gang_queue.update_gang(gang)
        del self._permits[gang.key]
        permit.decide(allowed=True)  # before anything that may raise: threads wait for this
        self.on_permit_ended("bound", now - permit.since)
        self.on_binding_started(gang.counted_members[0].created)

    def _reset_if_abandoned(self, gang: Gang, now: float) -> None:
        if not gang.is_abandoned:
            return
        if not any(self._reservations.known_binding(member.uid) is not None for member in gang.counted_members):
            self._after_transition(gang, gang.reset(now))

    def _end_plan(self, gang: Gang, reason: str) -> None:
        self._after_transition(gang, gang.cancel_plan(reason, self._clock.now()))

    def _after_transition(self, gang: Gang, reason: str | None) -> None:
        """Update the queue and the permit. Call this after each transition of the gang.

        reason: why the transition ended the plan; None if it did not.
        """
        self._gang_queue.update_gang(gang)
        if reason is None:
            return
        if not (gang.ran or gang.forward):
            self._queue.requeue_all_at(gang.backoff_until)
        permit = self._permits.pop(gang.key, None)
        if permit is not None:
            permit.decide(allowed=False, reason=reason)
            self.on_permit_ended("released", self._clock.now() - permit.since)

    def _on_group_changed(self, key: str) -> None:
        """Update the gang from its PodGroups."""
        gang = self._gangs.get(key)
        if gang is not None:
            was_complete, was_running = gang.complete, gang.ran
            self._update_group(gang)
            if gang.ran > was_running:
                self._places.remove_gang(key)
            if gang.complete > was_complete:
                self._queue.requeue_all()

    def _update_group(self, gang: Gang, member: Member | None = None) -> None:
        kinds = set(gang.foreign_podgroups)
        if member is not None and member.foreign_podgroup is not None:
            kinds.add(member.foreign_podgroup)
        group = self._groups.get(gang.key, PodGroupSpec())
        if ForeignPodGroup.KUBERNETES in kinds:
            # The minimum of Cardwise's PodGroup is ignored: kube-scheduler starts no fewer pods than its own PodGroup
            # says. It also counts pods without cards, so these are subtracted.
            other = self._foreign_podgroups.get((ForeignPodGroup.KUBERNETES, gang.key), PodGroupSpec())
            least = None if other.minimum is None else max(1, other.minimum - self._cardless[gang.key])
            group = replace(group, minimum=least, basic=other.basic)
        elif kinds and group.minimum is None:
            other = self._foreign_podgroups.get((ForeignPodGroup.COSCHEDULING, gang.key), PodGroupSpec())
            group = replace(group, minimum=other.minimum, permit=other.permit)
        self._after_transition(gang, gang.set_group(group, self._clock.now()))
