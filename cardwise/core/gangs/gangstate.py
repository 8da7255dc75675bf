"""The state machine of one gang: its phases, as explicit transitions. Callers pass in the times.

This module knows only the members: the planner (`gangplan`) handles nodes and cards, and the extender handles threads
and writes to the API server. The planned node of each member is in a `GangPlan`, a view of the extender's table of
reservations. A transition that ends the plan releases its reservations, and returns the reason; the extender reports
the reason to the binds that wait.
"""

from abc import abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from cardwise.core.api import names
from cardwise.core.gangs.gangs import (
    MAX_MEMBERS,
    MAX_REQUEST_KINDS,
    ForeignPodGroup,
    GangPatience,
    GangPhase,
    Member,
    PodGroupSpec,
    Rank,
    gang_rank,
)
from cardwise.core.gangs.roster import Roster
from cardwise.core.values import wording
from cardwise.core.values.refusals import Refusal

_FIRST_BACKOFF, _MAX_BACKOFF = 1.0, 60.0  # seconds
_REFUSAL_INTERVAL = 1.0  # seconds in which several refusals count as one
_MAX_NAMED_MEMBERS = 5  # members that a message names

PlanEndReason = str | None  # why a transition ended the plan of its gang; None if it did not


class GangPlan(Mapping[str, str]):
    """By UID, the planned node of each planned member: a view that changes with the table of reservations. A member
    whose Binding was posted stays in the plan until it is released, or until the API server shows the outcome.
    """

    @abstractmethod
    def release(self, uids: Iterable[str]) -> None:
        """Remove these members from the plan. Members whose Binding was posted keep their cards."""


def _minimum(name: str, group: PodGroupSpec, roster: Roster) -> tuple[int, str | None]:
    """The minimum number of pods of the gang; 0 if unknown; and why the gang can never be complete; None if it can."""
    if not roster.counted:
        return group.minimum or 0, "all its pods are ending"
    problem = next((f"{member.name}: {member.problem}" for member in roster.with_problem), None)
    native = ForeignPodGroup.KUBERNETES in roster.podgroup_origins
    if native and len(roster.podgroup_origins) > 1:
        problem = problem or "some of its pods name it by spec.schedulingGroup, others by annotation or label"
    if group.minimum is not None:
        minimum = group.minimum
        if not 1 <= minimum <= MAX_MEMBERS:
            problem = problem or f"its PodGroup requires {minimum} members; a gang may have 1 to {MAX_MEMBERS}"
        return minimum, problem
    minimums = roster.minimums
    if len(minimums) > 1:
        numbers = ", ".join(str(number) for number in sorted(minimums))
        return max(minimums), problem or f"its pods do not agree on {names.GROUP_NUM}: {numbers}"
    if native and not group.basic:
        return (
            0,
            problem
            or f"its pods name the PodGroup {name} ({ForeignPodGroup.KUBERNETES}/v1beta1), which does not exist",
        )
    if group.basic:
        return 1, problem
    if not minimums:
        return 0, problem or f"its number of pods is unknown: add {names.GROUP_NUM}, or a PodGroup {name}"
    return next(iter(minimums)), problem


@dataclass(slots=True, eq=False)
class Gang:
    """One gang of a namespace. A method that ends the whole plan returns the reason, else None.

    Waiting: there is no plan.
    Reserved: `plan` has all members that are missing to the minimum, and no Binding is posted.
    `forward`: some members are bound, or their Binding may be posted. `plan` has the other members; each is bound as
        soon as it reaches bind.
    """

    namespace: str
    name: str
    plan: GangPlan
    patience: GangPatience = field(default_factory=GangPatience)
    members: dict[str, Member] = field(default_factory=dict)
    group: PodGroupSpec = field(default_factory=PodGroupSpec)
    passed: set[str] = field(default_factory=set)  # members for which filter has returned the planned node
    arrived: set[str] = field(default_factory=set)  # members that wait in bind
    forward: bool = False
    committed: bool = False  # whether this leader committed the gang
    ran: bool = False  # whether the gang runs: at least the minimum of its members was bound
    evicting: set[str] = field(default_factory=set)  # bound members that a rollback evicts
    since: float = 0.0  # when the phase began, in seconds
    reason: str = ""  # why the last plan ended
    changes: int = 0  # how often its members or its PodGroup have changed
    _progress: float = 0.0  # when a member last came closer to running, in seconds
    _backoff_until: float = float("-inf")  # seconds
    _failures: int = 0  # plans in a row that failed
    _avoided: dict[tuple[str, str], float] = field(default_factory=dict)  # by shape and node, until when, in seconds
    # members whose reservation has expired, and for which filter has not been called since then
    _unpermitted_uids: set[str] = field(default_factory=set)
    _refused_since: float | None = None  # when the gang was first refused, in seconds
    _refused_at: float = 0.0  # when a refusal was last counted, in seconds
    _refusals: int = 0
    _roster: Roster = field(default_factory=Roster)
    _needed: tuple[int, str | None] | None = None  # the cached minimum and problem
    _rank: Rank | None = None

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.name}"

    # Members.

    def set_member(self, member: Member, now: float) -> PlanEndReason:
        """Record that a member was added or changed. Call this before the member's reservation changes."""
        member_before = self.members.get(member.uid)
        if member_before == member:
            return None
        member = self._roster.share_request(member)
        self.members[member.uid] = member
        self._update_roster(member_before, member)
        if member_before is None or member_before.is_counted != member.is_counted:
            self._start_over(now)
        if not member.is_counted:
            return self._remove_member(member, now)
        if member.node and (member_before is None or not member_before.node):
            self._progress = now
            return self._handle_lost_reservation(member, f"{member.name} was bound by another scheduler", now)
        return self._update_progress(now)

    def remove_member(self, uid: str, now: float) -> PlanEndReason:
        """Record that a member was deleted. Call this before the member's reservation changes."""
        member = self.members.pop(uid, None)
        if member is None:
            return None
        self._update_roster(member, None)
        self._unpermitted_uids.discard(uid)
        if member.is_counted:
            self._start_over(now)
        return self._remove_member(member, now)

    def set_group(self, group: PodGroupSpec, now: float) -> PlanEndReason:
        """Record that the PodGroup was added, changed or deleted."""
        if group == self.group:
            return None
        group_before, self.group = self.group, group
        self._has_changed()
        if group_before.minimum == group.minimum or not self.plan or self.forward:
            return self._update_progress(now)
        return self.cancel_plan("the minimum of the gang has changed", now)

    @property
    def minimum(self) -> int:
        """The minimum number of pods; 0 if unknown."""
        return self._minimum_and_problem()[0]

    @property
    def problem(self) -> str | None:
        """Why the gang, as written, can never be complete; None if it can."""
        return self._minimum_and_problem()[1]

    @property
    def counted_members(self) -> Sequence[Member]:
        """The members that count, the oldest first. Like the gang's other sequences, this one changes with the gang."""
        return self._roster.counted

    @property
    def bound_members(self) -> Sequence[Member]:
        """The members that have a node."""
        return self._roster.bound

    @property
    def foreign_podgroups(self) -> Collection[ForeignPodGroup]:
        """The API groups of other projects' PodGroups that members name."""
        return {kind for kind in self._roster.podgroup_origins if kind is not None}

    @property
    def has_minimum_from_member(self) -> bool:
        """Whether a member's own annotation or label sets the minimum."""
        return bool(self._roster.minimums)

    @property
    def complete(self) -> bool:
        minimum, problem = self._minimum_and_problem()
        return not problem and len(self._roster.ready) >= minimum

    @property
    def foreign_gate(self) -> str | None:
        """The scheduling gate of another project that keeps the gang from being complete, with its pod; or None."""
        if self.complete or len(self.counted_members) < self.minimum:
            return None
        return next(
            (f"{m.name} has the scheduling gate {m.foreign_gate}" for m in self._roster.with_foreign_gate), None
        )

    @property
    def phase(self) -> GangPhase:
        if self.ran:
            return GangPhase.RUNNING
        if self.evicting or (self.forward and not self.committed):
            return GangPhase.PARTLY_BOUND
        if self.forward:
            return GangPhase.BINDING
        if self.plan:
            return GangPhase.RESERVED
        return GangPhase.WAITING if self.complete else GangPhase.PENDING

    def members_to_ungate(self) -> Sequence[Member]:
        """The members whose gates must be removed now: the oldest ones if there are thousands."""
        return self._roster.gated[:MAX_MEMBERS] if self.ran or self.complete else ()

    def must_ungate(self, uid: str) -> bool:
        """Whether the member's gate must be removed."""
        return (self.ran or self.complete) and uid in self.members and self.members[uid].gated

    @property
    def has_gated_member(self) -> bool:
        """Whether a member that the plan needs is still gated: kube-scheduler does not schedule a gated pod."""
        return bool(self._roster.gated) and any(member.gated for member in self.members_to_plan())

    def missing_names(self) -> list[str]:
        """The sorted names of planned members that have not reached bind yet."""
        return sorted(self.members[uid].name for uid in self.plan if uid not in self.arrived)

    def rank(self) -> Rank:
        """The rank of the gang: the gang with the smallest rank goes first."""
        if self._rank is None:  # cached: it is read thousands of times between two changes
            oldest = self.counted_members[0] if self.counted_members else None
            highest = max(self._roster.priorities, default=0)
            self._rank = gang_rank(oldest, highest, self.group.priority, self.key)
        return self._rank

    @property
    def priority(self) -> int:
        """The highest priority of its members."""
        return -self.rank()[0]

    # Planning.

    def refusal(self, now: float) -> Refusal | None:
        """Why the gang must not be planned now; None if it may. Whether it fits is the planner's decision."""
        if self.is_status_stale or (self.evicting and not self.forward):
            return Refusal.GANG_BACKS_OFF
        if not self.complete:
            return Refusal.GANG_INCOMPLETE
        if (self.evicting or not self.forward) and now < self._backoff_until:
            return Refusal.GANG_BACKS_OFF
        if self._unpermitted_uids and any(member.uid in self._unpermitted_uids for member in self.members_to_plan()):
            return Refusal.GANG_WAITS
        return None

    @property
    def is_status_stale(self) -> bool:
        """Whether the gang's PodGroup still has the phase Running, although the gang does not run. With this phase, a
        new leader would take a partly bound gang for a running gang.
        """
        return self.group.running and not self.ran

    def members_to_plan(self) -> list[Member]:
        """The members that a plan needs: as many as are missing to the minimum, the oldest first.

        Members whose reservation has expired come last, so other members are planned instead if there are enough.
        """
        free, missing_count = self._roster.free, max(0, self.minimum - len(self.bound_members))
        if not self._unpermitted_uids:
            return list(free[:missing_count])
        punctual_members = list(
            islice((member for member in free if member.uid not in self._unpermitted_uids), missing_count)
        )
        return punctual_members + list(
            islice(
                (member for member in free if member.uid in self._unpermitted_uids),
                missing_count - len(punctual_members),
            )
        )

    def missing_in_plan(self) -> list[Member]:
        """The members of `members_to_plan` that are not in the plan yet."""
        members = self.members_to_plan()
        return [member for member in members if member.uid not in self.plan] if self.plan else members

    def mark_requested(self, uid: str) -> None:
        """Record that kube-scheduler has called filter for this member."""
        self._unpermitted_uids.discard(uid)

    def avoided_pairs(self, now: float) -> Collection[tuple[str, str]]:
        """The pairs of shape and node from recent calls of `avoid_node`."""
        if self._avoided:
            self._avoided = {pair: end for pair, end in self._avoided.items() if end > now}
        return self._avoided.keys()

    def avoid_node(self, uid: str, node: str, now: float) -> None:
        """Avoid the node for a while, for this member and members with equal shape, because kube-scheduler did not
        offer the node.
        """
        self._avoided[self.members[uid].shape, node] = now + 2 * _delay(self._failures + 1)

    def mark_planned(self, uids: Collection[str], now: float, *, is_new: bool) -> None:
        """Record that these members are planned. Together with the plan's other members they reach the minimum.

        is_new: whether the gang had no plan before.
        """
        if is_new:
            self.arrived.clear()
            self.since = self._progress = now
        self.passed.difference_update(uids)
        self.arrived.difference_update(uids)
        self._refused_since, self._refusals = None, 0

    def mark_refused(self, now: float) -> None:
        """Record that the gang does not fit as a whole. Refusals of several members within a second count as one."""
        if self._refused_since is None:
            self._refused_since = self._refused_at = now
            self._refusals = 1
        elif now - self._refused_at >= _REFUSAL_INTERVAL:
            self._refused_at = now
            self._refusals += 1

    def is_reservation_due(self, now: float) -> bool:
        """Whether the gang has waited long enough for a gang reservation: cards are then reserved until it fits."""
        if self._refused_since is None or self.ran or self.plan or not self.complete:
            return False
        return self._refusals >= self.patience.refusals or now - self._refused_since >= self.patience.reserve

    # Binding.

    def mark_permitted(self, uid: str, now: float) -> None:
        """Record that filter returns the planned node for this member."""
        if uid not in self.passed:
            self.passed.add(uid)
            self._progress = now

    def mark_arrived(self, uid: str, now: float) -> bool:
        """Record that the member waits in bind. Returns whether all members of the plan wait."""
        self.passed.add(uid)
        self.arrived.add(uid)
        self._progress = now
        return self.arrived >= self.plan.keys()

    def commit(self, now: float) -> None:
        """Commit the gang, because all members of the plan wait in bind. The gang is `forward` from now on."""
        self.forward = self.committed = True
        self.since = self._progress = now

    def mark_posted(self, uid: str, now: float) -> None:
        """Record that the member's Binding was posted: the time until a rollback starts again."""
        if uid in self.plan:
            self._progress = now

    def expiry_reason(self, now: float, *, others_short: bool = False) -> str | None:
        """Why the gang's reservation expires now; None if it does not.

        others_short: whether other gangs lack threads to wait in bind. Then a time in the PodGroup that is longer than
            the default is ignored.
        """
        # A PodGroup may exceed `max_permit`, if it is older than the admission policy or belongs to coscheduling.
        max_permit = min(self.patience.permit, self.patience.max_permit) if others_short else self.patience.max_permit
        seconds = min(self.patience.permit if self.group.permit is None else self.group.permit, max_permit)
        if not self.plan or self.forward or now - self._progress < seconds:
            return None
        missing = wording.enumerate_first(self.missing_names(), _MAX_NAMED_MEMBERS)
        return f"{missing} did not reach bind within {seconds:.0f} s"

    def cancel_plan(self, reason: str, now: float) -> PlanEndReason:
        """Cancel the plan of a gang that is not `forward`: release all its reservations. No Binding was posted."""
        if not self.plan or self.forward:
            return None
        for uid, node in self.plan.items():
            member = self.members.get(uid)
            if member is None or uid in self.arrived:
                continue
            if uid in self.passed:
                self.avoid_node(uid, node, now)
            else:
                self._unpermitted_uids.add(uid)
        self._back_off(reason, now)
        return reason

    # Failures after the first bind.

    def rollback_due(self, now: float) -> bool:
        """Whether the gang has been bound in part for so long that the bound members must be evicted."""
        if not self.forward or self.evicting or self.ran or self.problem:
            return False
        return now - self._progress >= self.patience.rollback

    def adopt(self, now: float, wall: float) -> None:
        """Take over the gang as a new leader. The time under former leaders counts towards the time until the rollback.
        But at least a quarter of the rollback time remains, because the missing members may fit now.

        wall: the current wall time.
        """
        if self.forward and self.group.partly_bound_since is not None:
            self._progress = now - min(max(0.0, wall - self.group.partly_bound_since), 0.75 * self.patience.rollback)

    def begin_rollback(self, now: float) -> PlanEndReason:
        """Begin to evict the bound members (`evicting`), and cancel the plan of the other members.

        A PodDisruptionBudget may prevent evictions for ever. So until the first member is evicted, the other members
        are still bound if cards for them become free. If no member is bound, the gang waits again until all members can
        be bound.
        """
        self.evicting = {member.uid for member in self.bound_members}
        self.forward, self.committed = bool(self.bound_members), False
        self._back_off("the gang could not be bound whole and is rolled back", now)
        return self.reason

    @property
    def is_abandoned(self) -> bool:
        """Whether a `forward` gang without bound members can no longer be bound as planned. Either a former leader
        committed the gang, or the plan has fewer members than the minimum.
        """
        return self.forward and not self.bound_members and (not self.committed or len(self.plan) < self.minimum)

    def reset(self, now: float) -> PlanEndReason:
        """Reset an abandoned gang: it waits again until all members can be bound. No Binding may be in progress."""
        self._clear()
        self.forward = self.committed = False
        self.since = now
        return "nothing of the gang is bound any more"

    def reset_to_cluster(self, now: float) -> PlanEndReason:
        """Keep only the state that the API server shows, because another extender is the leader now."""
        self._clear()
        self.evicting.clear()
        self.forward = self.committed = False
        self._progress = self.since = now
        self._update_progress(now)
        return "this extender does not hold the lease"

    # Derived state.

    def _minimum_and_problem(self) -> tuple[int, str | None]:
        """The values of `minimum` and `problem`, cached."""
        if self._needed is None:
            minimum, problem = _minimum(self.name, self.group, self._roster)
            kinds = len(self._roster.kinds)
            if kinds > MAX_REQUEST_KINDS and not problem:
                problem = f"its pods have {kinds} different requests (GPUs, cpu, memory)"
                problem = f"{problem}; a gang may have at most {MAX_REQUEST_KINDS}"
            self._needed = minimum, problem
        return self._needed

    def _update_roster(self, member_before: Member | None, member: Member | None) -> None:
        """Update the roster for a member that was added, changed or removed."""
        self._roster.update_member(member_before, member)
        self._has_changed()

    def _has_changed(self) -> None:
        self.changes += 1
        self._needed = self._rank = None

    def _update_progress(self, now: float) -> PlanEndReason:
        """Update whether the gang runs or is bound in part. Call this when its members or its PodGroup have changed."""
        if self.group.basic:
            return None if self.ran else self._mark_running(now)
        minimum, problem = self._minimum_and_problem()
        if self.evicting:
            self.evicting = {uid for uid in self.evicting if (m := self.members.get(uid)) and m.is_counted and m.node}
        if self.ran and not self.bound_members:
            self.ran = False
            self.since = now
        if not self.ran and self.bound_members and (self.forward or not self.evicting):
            is_whole = not problem and len(self.bound_members) >= minimum
            if is_whole or (self.group.running and not self.forward):
                return self._mark_running(now)
        if self.ran or self.evicting:
            return None
        if self.bound_members and not self.forward and not problem:  # a gang without a minimum cannot be bound in part
            end_reason = self.cancel_plan("a member was bound by another scheduler", now)
            self.forward = True
            self.since = self._progress = now
            return end_reason
        if self.forward and not self.bound_members and not self.plan:
            self.forward = self.committed = False
            self.since = now
        return None

    def _mark_running(self, now: float) -> PlanEndReason:
        end_reason = "the gang runs" if self.plan else None
        self._clear()
        self.ran = True
        self.forward = self.committed = False
        self.evicting.clear()
        self._failures, self._backoff_until, self.reason = 0, float("-inf"), ""
        self._refused_since, self._refusals = None, 0
        self.since = now
        return end_reason

    def _remove_member(self, member: Member, now: float) -> PlanEndReason:
        """Remove a member that no longer counts."""
        if member.uid in self.evicting and self.forward:
            self._clear()
            self.forward = False
            self.evicting = {bound_member.uid for bound_member in self.bound_members}
            self._update_progress(now)
            return "the gang is rolled back"
        end_reason = self._handle_lost_reservation(
            member, f"{member.name} was deleted", now, is_whole=member.uid in self.plan
        )
        if end_reason:
            self._start_over(now)
        return end_reason

    def _handle_lost_reservation(
        self, member: Member, reason: str, now: float, *, is_whole: bool = True
    ) -> PlanEndReason:
        """Handle a member that no longer needs its planned node and cards.

        is_whole: whether this ends the plan of a gang that is not `forward`.
        """
        if is_whole and self.plan and not self.forward:
            end_reason = self.cancel_plan(reason, now)
            self._update_progress(now)
            return end_reason
        self.unplan(member.uid)
        return self._update_progress(now)

    def unplan(self, uid: str) -> None:
        """Remove the member from the plan."""
        self.plan.release((uid,))
        self.passed.discard(uid)
        self.arrived.discard(uid)

    def _clear(self) -> None:
        self.plan.release(list(self.plan))
        self.passed.clear()
        self.arrived.clear()

    def _start_over(self, now: float) -> None:
        """Reset the back-off, because the gang's members have changed."""
        self._failures, self._backoff_until = 0, now
        self._avoided.clear()
        self._unpermitted_uids.clear()

    def _back_off(self, reason: str, now: float) -> None:
        self._clear()
        self._failures += 1
        self._backoff_until = now + _delay(self._failures)
        self.reason = reason
        self.since = now

    @property
    def backoff_until(self) -> float:
        """The time at which the gang may be planned again."""
        return self._backoff_until


def _delay(failures: int) -> float:
    """The back-off in seconds after this number of failures in a row."""
    return float(min(_MAX_BACKOFF, _FIRST_BACKOFF * 2 ** min(failures - 1, 10)))
