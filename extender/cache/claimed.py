"""Pods whose shares are allocated by ResourceClaim: which of them to plan, which claims to take back, which to delete.

Theory of operation. A pod without a node can be bound only by its allocated claim, so until the pod is bound the claim
is the truth about its share, and afterwards the pod's annotation is, as for all pods. The table of reservations follows
the claim: a row of such a pod ends only when its claim is deleted and a read after that shows the pod without a node.

Each pod goes through these steps, and the watches may show them in any order::

    pending ──► BINDING: a thread writes the claim and opens the gate ──► ALLOCATED ──► BOUND: the watch of pods
       ▲            │ a call failed                                           │ refused: the claim was deallocated, or
       │            ▼                                                         │ kube-scheduler finds no node
       └─────── UNCONFIRMED: read, delete the claim, read again ◄─────────────┘

Example: pod P is allocated on node A at second 0. At 0.1 kube-scheduler finds that A has no free port for P, and
deallocates the claim. The watch shows that, P's row becomes UNCONFIRMED, and a thread deletes the claim. The row ends
at 0.2, and A is avoided for P until 30, or until a pod leaves A. P is planned on B at once; after later refusals it
waits 1, 2, 4, ... seconds before, at most 60.

Each call holds the lock of `State`, and there may be tens of thousands of pods and claims. So no method walks over all
of them: what is due is found by its time (`Deadlines`), and callers read lists of UIDs in parts (`in_parts`). Not
thread-safe.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from cardwise.clock import Clock
from cardwise.core.api import assignment as codec
from cardwise.core.api.assignment import Assignment, InvalidAssignment
from cardwise.core.gangs.gangs import Member
from cardwise.core.values.decoded import annotations_of
from cardwise.core.values.wording import quote_text
from extender.cache.deadlines import Deadlines
from extender.cache.nodeload import NodeLoads
from extender.cache.reservations import UNPOSTED_PHASES, Phase, Reservation, Reservations
from extender.records.claim import ClaimRecord, PendingByClaim
from extender.records.podref import PodRef

_AVOID_SECONDS: Final = 30.0  # seconds for which a node that kube-scheduler has refused is avoided for this pod
_FIRST_BACKOFF, _MAX_BACKOFF = 1.0, 60.0  # seconds
_MAX_DOUBLINGS: Final = 6
# Seconds after which a pod that kube-scheduler cannot place is taken back: it usually deallocates the claim before.
_REFUSED_SECONDS: Final = 1.0
# The same, if the pod's status said so already before the allocation: then the status may be of an earlier attempt.
_STALE_REFUSAL_SECONDS: Final = 10.0
# The same, if its scheduler has neither bound nor refused it: it does not exist, or hangs. kube-scheduler waits for
# volumes for 600 s by default.
_ANSWER_SECONDS: Final = 120.0
_ANSWER_SECONDS_WITH_VOLUMES: Final = 660.0
_UNANSWERED_BACKOFF, _MAX_UNANSWERED_BACKOFF = 60.0, 960.0  # seconds without a GPU then
_UNUSED_SECONDS: Final = 5.0  # seconds for which a claim without a pod is kept: the watches may be late
_LOST_SECONDS: Final = 2.0  # seconds after which a bound pod without its claim gets it again: the watches may be late
_FOREVER: Final = float("inf")
_PODS_PER_HOLD: Final = 32  # pods for the methods that take UIDs: below 1 ms also for members of big gangs
_MAX_TIMES: Final = 256  # times that are read in one call; the next call continues


@dataclass(slots=True)
class _Attempts:
    """What is remembered of a pod's attempts.

    failures: refusals and failed writes in a row.
    not_before: when the pod may be planned again.
    avoided: by node, until when the node is avoided, and the node's `NodeLoads.freed_count_of` at the refusal.
    refused_before: whether the pod's status said at the allocation that kube-scheduler finds no node.
    refused_since: when its status said so first since the allocation.
    """

    failures: int = 0
    not_before: float = float("-inf")
    avoided: dict[str, tuple[float, int]] = field(default_factory=dict)
    refused_before: bool = False
    refused_since: float = _FOREVER


class _Refusal(NamedTuple):
    """Why a claim is taken back. `by_node`: whether the node is the reason, and is avoided."""

    reason: str
    by_node: bool = True


class TakeBack(NamedTuple):
    """A pod whose claim must be read, and usually deleted.

    refusal: why the claim must be deleted even if it is whole: how kube-scheduler has refused the node. None if it has
        not.
    """

    pod: PodRef
    node: str
    assignment: Assignment | None
    refusal: str | None


def in_parts(uids: Sequence[str]) -> Iterator[Sequence[str]]:
    """The UIDs in parts of which each is for one hold of the lock."""
    return (uids[first : first + _PODS_PER_HOLD] for first in range(0, len(uids), _PODS_PER_HOLD))


def _answer_seconds(pod: PendingByClaim) -> float:
    return _ANSWER_SECONDS_WITH_VOLUMES if pod.has_volumes else _ANSWER_SECONDS


class ClaimedPods:
    """The pending pods by claim, and all claims of Cardwise's class."""

    def __init__(
        self,
        reservations: Reservations,
        loads: NodeLoads,
        gang_members: Callable[[str], Sequence[Member]],
        clock: Clock,
    ) -> None:
        self.changes = 0  # how many changes may let a pod be planned
        self._reservations = reservations
        self._loads = loads
        self._gang_members = gang_members
        self._clock = clock
        self._pods: dict[str, PendingByClaim] = {}  # by UID
        self._claims: dict[str, ClaimRecord] = {}  # by key
        self._keys_by_pod: dict[str, str] = {}  # by the UID of the pod that owns the claim, the claim's key
        self._deleted: dict[str, None] = {}  # UIDs of claims that this process has deleted and that the watch shows
        self._attempts: dict[str, _Attempts] = {}  # by UID of a pending pod
        # By UID of pods whose row is UNCONFIRMED since a refusal, or BINDING: a gang is refused while it is published.
        self._refused: dict[str, _Refusal] = {}
        self._bound: set[str] = set()  # UIDs of bound pods that need a claim
        self._lost = Deadlines()  # by UID of a bound pod without an allocated claim, when to restore the claim
        self._to_restore: dict[str, None] = {}  # UIDs of bound pods whose claims must be restored now
        self._queue: list[tuple[int, str, str]] = []  # `PendingByClaim.order` of all `_pods`, sorted
        self._backoffs = Deadlines()  # by UID, when the pod may be planned again
        self._checks = Deadlines()  # by UID of an allocated pod, when to check whether kube-scheduler has refused it
        self._unused = Deadlines()  # by key of a claim that may have no pod any more, when it may be deleted
        reservations.on_ended = self._on_pod_ended

    # Objects of the API server.

    def set_pod(self, pod: PendingByClaim) -> None:
        """Update a pod without a node."""
        uid = pod.ref.uid
        self._set_bound(uid, needs_claim=False)
        before, self._pods[uid] = self._pods.get(uid), pod
        attempts = self._attempts.setdefault(uid, _Attempts(refused_before=pod.refused))
        row = self._reservations.get(uid)
        if before is None or before.order != pod.order:
            self._remove_from_queue(before)
            insort(self._queue, pod.order)
        if row is not None and row.phase is Phase.ALLOCATED and pod.refused:
            attempts.refused_since = min(attempts.refused_since, self._clock.now())
            self._checks.set(uid, self._check_time(row, attempts, pod))
        if before is None or (before.claim, before.gated, before.is_schedulable) != (
            pod.claim,
            pod.gated,
            pod.is_schedulable,
        ):
            self.changes += 1
            self._adopt(uid)

    def remove_pod(self, uid: str) -> None:
        """Forget a pod that is finished or gone, or that does not wait for a claim."""
        self._set_bound(uid, needs_claim=False)
        pod = self._pods.pop(uid, None)
        if pod is not None:
            self._remove_from_queue(pod)
            self.changes += 1
        self._attempts.pop(uid, None)
        self._refused.pop(uid, None)
        self._backoffs.discard(uid)
        self._checks.discard(uid)
        self._on_pod_ended(uid)

    def mark_bound(self, uid: str, *, has_claim: bool) -> None:
        """Record that a pod is bound. If it has lost its claim, or loses it later, `take_backs` names it."""
        self.remove_pod(uid)
        self._set_bound(uid, needs_claim=has_claim)

    def end_restore(self, uid: str) -> None:
        """Record that a bound pod has its claim, or needs none."""
        self._lost.discard(uid)
        self._to_restore.pop(uid, None)

    def set_claim(self, claim: ClaimRecord) -> None:
        """Update a claim."""
        if claim.uid in self._deleted:
            return
        before = self._claims.get(claim.key)
        if before is not None and before.uid == claim.uid and not claim.pod.uid:
            claim = claim._replace(pod=before.pod)  # the pod is being deleted, and has left the claim behind
        self._claims[claim.key] = claim
        if claim.pod.uid:
            self._keys_by_pod[claim.pod.uid] = claim.key
        if before is None or before.uid != claim.uid:
            self._unused.discard(claim.key)
            self._mark_unused(claim)
        if before is not None and before.uid == claim.uid and before.is_allocated and not claim.is_allocated:
            self._on_refused(
                claim.pod.uid, _Refusal("kube-scheduler has deallocated the claim; another node is chosen")
            )
        else:
            self._adopt(claim.pod.uid)
        self._look_for_claim(claim.pod.uid)

    def remove_claim(self, key: str) -> None:
        """Remove a claim that is gone."""
        claim = self._claims.pop(key, None)
        if claim is None:
            return
        self._unused.discard(key)
        was_deleted_here = self._deleted.pop(claim.uid, claim) is None
        if self._keys_by_pod.get(claim.pod.uid) == key:
            del self._keys_by_pod[claim.pod.uid]
        if not was_deleted_here and claim.is_allocated:
            self._on_refused(claim.pod.uid, _Refusal("the claim was deleted; another node is chosen"))
        self._look_for_claim(claim.pod.uid)

    def reserve_by_annotations(self, uids: Iterable[str], nodes_of: Callable[[Assignment], Collection[str]]) -> None:
        """Set the rows of those of these pods that a former extender has allocated, without reading claims.

        For another scheduler.mode: kube-scheduler may bind the pods by their claims at any moment. Their GPUs are
        reserved until they are bound or deleted.

        nodes_of: returns the nodes with the cards.
        """
        for uid in uids:
            pod, row = self._pods.get(uid), self._reservations.get(uid)
            if pod is None or pod.gated or pod.claim is None or self._has_known_row(row):
                continue
            try:
                assignment = codec.decode(annotations_of(pod.read_manifest()))
            except InvalidAssignment:
                continue
            nodes = nodes_of(assignment) if assignment is not None else ()
            if assignment is not None and nodes:
                self._reservations.release_plan(uid)
                self._reservations.set_allocated(pod.waiting, min(nodes), assignment, Phase.ALLOCATED)

    # Pods to plan.

    def queue(self) -> list[tuple[int, str, str]]:
        """`PendingByClaim.order` of all pods without a node, sorted. It ends with the UID, for `due_pods`."""
        return self._queue.copy()

    def due_pods(self, uids: Iterable[str]) -> list[PendingByClaim]:
        """The pods among these that may be planned now."""
        now = self._clock.now()
        return [pod for uid in uids if (pod := self._pods.get(uid)) is not None and self._is_due(pod, now)]

    def next_due(self) -> float:
        """When the back-off of the next pod ends, in seconds of the clock; infinity if no pod backs off."""
        now = self._clock.now()
        for _ in range(_MAX_TIMES):
            if self._backoffs.pop_due(now) is None:
                break
        return self._backoffs.next()

    def get(self, uid: str) -> PendingByClaim | None:
        """The pod, if it has no node and waits for its claim or its gate."""
        return self._pods.get(uid)

    def avoided_nodes(self, uid: str) -> set[str]:
        """The nodes that kube-scheduler has refused for the pod lately, and that no pod has left since."""
        attempts, now = self._attempts.get(uid), self._clock.now()
        if attempts is None:
            return set()
        return {
            node
            for node, (until, freed_count) in attempts.avoided.items()
            if until > now and self._loads.freed_count_of(node) == freed_count
        }

    # Outcomes.

    def forget_refusal(self, uid: str) -> None:
        """Record that nothing was written for the pod: a refusal was that of an earlier attempt."""
        self._refused.pop(uid, None)

    def mark_allocated(self, uid: str) -> None:
        """Record that this process has allocated the pod's claim and opened its gate."""
        claim = self._claim_of(uid)
        if self._refused.pop(uid, None) is not None and (claim is None or not claim.is_allocated):
            self._on_refused(uid, _Refusal("kube-scheduler has deallocated the claim; another node is chosen"))
            return
        attempts, pod = self._attempts.get(uid), self._pods.get(uid)
        if attempts is not None and pod is not None:
            attempts.refused_before, attempts.refused_since = pod.refused, _FOREVER
            row = self._reservations.get(uid)
            if row is not None:
                self._checks.set(uid, self._check_time(row, attempts, pod))

    def mark_failed(self, uid: str, *, node: str = "", seconds: float = 0.0, is_unanswered: bool = False) -> None:
        """Record that the pod could not be placed.

        node: a node that the pod avoids from now on.
        seconds: the minimum back-off.
        is_unanswered: whether the pod's scheduler did not answer.
        """
        attempts = self._attempts.get(uid)
        if attempts is None:
            return
        now = self._clock.now()
        if node:
            attempts.avoided = {name: entry for name, entry in attempts.avoided.items() if entry[0] > now}
            seconds_avoided = _AVOID_SECONDS * 2 ** min(attempts.failures, _MAX_DOUBLINGS)
            attempts.avoided[node] = now + seconds_avoided, self._loads.freed_count_of(node)
        factor = 2 ** min(attempts.failures, _MAX_DOUBLINGS + 1)
        if is_unanswered:
            backoff = min(_UNANSWERED_BACKOFF * factor, _MAX_UNANSWERED_BACKOFF)
        else:
            backoff = min(_FIRST_BACKOFF * factor / 2, _MAX_BACKOFF) if attempts.failures else 0.0
        attempts.not_before = now + max(seconds, backoff)
        if attempts.not_before > now:
            self._backoffs.set(uid, attempts.not_before)
        attempts.failures += 1
        self.changes += 1

    def mark_claim_deleted(self, uid: str, claim_uid: str) -> None:
        """Record that this process has deleted the pod's claim. Later events of the claim are outdated."""
        key = self._keys_by_pod.get(uid)
        claim = self._claims.get(key or "")
        if claim is not None and claim.uid == claim_uid:
            self._claims[claim.key] = claim._replace(allocation=None, problem="")
            self._deleted[claim_uid] = None
            self._look_for_claim(uid)

    def end_take_back(self, uid: str, phase: Phase | None, *, seconds: float = 0.0) -> None:
        """Record the outcome of reading a pod from `take_backs`, as in `Reservations.settle_claim`.

        seconds: the minimum back-off of the pod.
        """
        row = self._reservations.get(uid)
        node = row.node if row is not None else ""
        refusal = self._refused.pop(uid, None)
        self._reservations.settle_claim(uid, phase)
        if phase is None:
            avoided = node if refusal is not None and refusal.by_node else ""
            is_unanswered = refusal is not None and not refusal.by_node
            self.mark_failed(uid, node=avoided, seconds=seconds, is_unanswered=is_unanswered)
        elif phase is Phase.ALLOCATED:
            self.mark_allocated(uid)

    def begin_epoch(self, uids: Iterable[str]) -> None:
        """Begin a leader epoch for these pods: the claims that could not be used yet are deleted, and all others are
        known. Rows of former attempts follow the claims. A claim of a gated pod that is still there keeps its GPUs
        until it is read: it could not be deleted, or its gang has started.
        """
        for uid in uids:
            if self._is_unconfirmed(uid):
                self._refused.pop(uid, None)
                self._reservations.settle_claim(uid, None)
                self._adopt(uid)
            pod, claim = self._pods.get(uid), self._claim_of(uid)
            if pod is None or not pod.gated or claim is None or claim.allocation is None:
                continue
            if claim.allocation.pod_uid != uid:
                continue
            former = self._reservations.get(uid)
            if former is None or former.phase in UNPOSTED_PHASES:
                self._reservations.release_plan(uid)
                node, assignment = claim.allocation.node, claim.allocation.assignment
                self._reservations.set_allocated(pod.waiting, node, assignment, Phase.UNCONFIRMED)
        self.changes += 1

    # Claims to take back and to delete.

    def uids_to_take_back(self) -> list[str]:
        """The UIDs of the pods for `take_backs`: refused ones, those with an unknown outcome, and bound ones without
        their claim.
        """
        now = self._clock.now()
        for _ in range(_MAX_TIMES):
            uid = self._checks.pop_due(now)
            if uid is None:
                break
            self._check_refusal(uid, now)
        for _ in range(_MAX_TIMES):
            uid = self._lost.pop_due(now)
            if uid is None:
                break
            self._to_restore[uid] = None
        return [*self._to_restore, *self._reservations.uids_in_phase(Phase.UNCONFIRMED)]

    def take_backs(self, uids: Iterable[str]) -> list[TakeBack]:
        """The pods among these whose claims must be read."""
        entries = []
        for uid in uids:
            row = self._reservations.get(uid)
            if row is None:
                self._to_restore.pop(uid, None)  # its annotations give it no GPU
            elif uid in self._to_restore or self._is_unconfirmed(uid):
                entries.append(self._make_take_back(row))
        return entries

    def gang_uids(self, uid: str) -> list[str]:
        """The UIDs of the members of the pod's gang; empty if it is in none."""
        return [member.uid for member in self._gang_members(uid)]

    def is_gang_started(self, uid: str) -> bool:
        """Whether kube-scheduler may bind another member of the pod's gang, or has."""
        return any(self._may_be_bound(member) for member in self._gang_members(uid) if member.uid != uid)

    def unread_members(self, uid: str, read_uids: Collection[str]) -> list[str]:
        """The UIDs of the other members of the pod's gang whose outcome is unknown, without `read_uids`."""
        uids = (member.uid for member in self._gang_members(uid) if member.uid != uid)
        return [other for other in uids if other not in read_uids and self._is_unconfirmed(other)]

    def claims_to_fence(self, uids: Iterable[str]) -> list[ClaimRecord]:
        """The claims of these pods by which kube-scheduler cannot bind the pod yet: the gate is closed, or the claim is
        not allocated. A former leader has not finished them, and may still be about to.

        Not those of a gang that has started: `begin_epoch` lets them be finished.
        """
        return [
            claim
            for uid in uids
            if (pod := self._pods.get(uid)) is not None
            and (claim := self._claim_of(uid)) is not None
            and (pod.gated or claim.allocation is None)
            and not self._must_finish(pod, claim)
        ]

    def unused_claims(self, max_count: int) -> list[ClaimRecord]:
        """Up to `max_count` claims that no pod needs: the pod has ended, its node has proved that, and the claim still
        exists.

        Each is returned again after `_UNUSED_SECONDS`, behind all others, until the watch shows its deletion.
        """
        now, unused = self._clock.now(), list[ClaimRecord]()
        for _ in range(max_count):
            key = self._unused.pop_due(now)
            if key is None:
                break
            claim = self._claims[key]
            if claim.uid not in self._deleted and self._is_unused(claim):
                self._unused.set(key, now + _UNUSED_SECONDS)
                unused.append(claim)
        return unused

    # Private helpers.

    def _claim_of(self, uid: str) -> ClaimRecord | None:
        """The claim that the pod owns; None if there is none, or if this process has deleted it."""
        claim = self._claims.get(self._keys_by_pod.get(uid, ""))
        return claim if claim is not None and claim.uid not in self._deleted else None

    def _set_bound(self, uid: str, *, needs_claim: bool) -> None:
        if needs_claim:
            self._bound.add(uid)
        else:
            self._bound.discard(uid)
        self._look_for_claim(uid)

    def _look_for_claim(self, uid: str) -> None:
        """Note whether the pod is bound and has no allocated claim."""
        claim = self._claim_of(uid)
        if uid not in self._bound or (claim is not None and claim.is_allocated):
            self.end_restore(uid)
        elif uid not in self._to_restore and uid not in self._lost:
            self._lost.set(uid, self._clock.now() + _LOST_SECONDS)

    def _remove_from_queue(self, pod: PendingByClaim | None) -> None:
        if pod is not None:
            del self._queue[bisect_left(self._queue, pod.order)]

    def _is_unused(self, claim: ClaimRecord) -> bool:
        row = self._reservations.get(claim.pod.uid)
        return claim.pod.uid not in self._pods and (row is None or row.phase is Phase.ORPHANED)

    def _on_pod_ended(self, uid: str) -> None:
        claim = self._claims.get(self._keys_by_pod.get(uid, ""))
        if claim is not None:
            self._mark_unused(claim)

    def _mark_unused(self, claim: ClaimRecord) -> None:
        """Record that the claim may have no pod any more. The watches may be late, so it is kept for a while."""
        if claim.key not in self._unused and self._is_unused(claim):
            self._unused.set(claim.key, self._clock.now() + _UNUSED_SECONDS)

    def _refusal_time(self, row: Reservation, attempts: _Attempts) -> float:
        """When the pod counts as refused by kube-scheduler, if its status still says so then."""
        pod = self._pods.get(row.pod.uid)
        if pod is not None and pod.has_volumes:  # the status may be of an earlier attempt, and come late
            return row.since + _answer_seconds(pod) if pod.refused else _FOREVER
        seconds = _STALE_REFUSAL_SECONDS if attempts.refused_before else _REFUSED_SECONDS
        since = row.since if attempts.refused_before and pod is not None and pod.refused else attempts.refused_since
        return since + seconds * 2.0 ** min(attempts.failures, _MAX_DOUBLINGS)

    def _check_time(self, row: Reservation, attempts: _Attempts, pod: PendingByClaim) -> float:
        """When the allocated pod must be checked again."""
        return self._refusal_time(row, attempts) if pod.refused else row.since + _answer_seconds(pod)

    def _check_refusal(self, uid: str, now: float) -> None:
        row, attempts, pod = self._reservations.get(uid), self._attempts.get(uid), self._pods.get(uid)
        if row is None or row.phase is not Phase.ALLOCATED or attempts is None or pod is None:
            return
        if self._refusal_time(row, attempts) <= now:
            self._on_refused(uid, _Refusal("kube-scheduler finds no node for the pod; another node is chosen"))
        elif now < (time := self._check_time(row, attempts, pod)):
            self._checks.set(uid, time)
        else:
            problem = (
                f"scheduler {quote_text(pod.scheduler)} has not scheduled the pod for {_answer_seconds(pod):.0f} s"
            )
            remedy = "see that it runs, or create the pod again with another spec.schedulerName"
            self._on_refused(uid, _Refusal(f"{problem}; {remedy}", by_node=False))

    def _make_take_back(self, row: Reservation) -> TakeBack:
        uid = row.pod.uid
        refusal = self._refused.get(uid)
        reason = refusal.reason if refusal is not None else None
        return TakeBack(row.pod, row.node, row.assignment, reason)

    @staticmethod
    def _has_known_row(row: Reservation | None) -> bool:
        """Whether the pod is or may be bound to the row's node."""
        return row is not None and row.phase not in UNPOSTED_PHASES and row.phase is not Phase.ORPHANED

    def _is_due(self, pod: PendingByClaim, now: float) -> bool:
        if self._has_known_row(self._reservations.get(pod.ref.uid)):
            return False
        return pod.is_schedulable and self._attempts[pod.ref.uid].not_before <= now

    def _adopt(self, uid: str) -> None:
        """Set the pod's row from a claim that another process has allocated.

        Not while the gate is closed: kube-scheduler cannot bind the pod then, and a new leader deletes the claim.
        """
        pod, claim = self._pods.get(uid), self._claim_of(uid)
        if pod is None or pod.gated or claim is None or claim.allocation is None:
            return
        if pod.claim is None or pod.claim.claim != claim.name or claim.allocation.pod_uid != uid:
            return
        if not self._has_known_row(self._reservations.get(uid)):
            self._reservations.release_plan(uid)
            node, assignment = claim.allocation.node, claim.allocation.assignment
            self._reservations.set_allocated(pod.waiting, node, assignment, Phase.ALLOCATED)
            self.mark_allocated(uid)

    def _must_finish(self, pod: PendingByClaim, claim: ClaimRecord) -> bool:
        """Whether only the gate of a member is missing, and its gang has started."""
        is_own = claim.allocation is not None and claim.allocation.pod_uid == pod.ref.uid
        return pod.gated and is_own and self.is_gang_started(pod.ref.uid)

    def _may_be_bound(self, member: Member) -> bool:
        """Whether kube-scheduler may bind the member of a gang, or has. One without a GPU waits for its gate only."""
        row = self._reservations.get(member.uid)
        is_allocated = row is not None and row.phase is Phase.ALLOCATED
        is_open_without_claim = member.uid not in self._pods and not member.gated
        return bool(member.node) or is_allocated or is_open_without_claim

    def _is_unconfirmed(self, uid: str) -> bool:
        row = self._reservations.get(uid)
        return row is not None and row.phase is Phase.UNCONFIRMED and row.by_claim

    def _on_refused(self, uid: str, refusal: _Refusal) -> None:
        row = self._reservations.get(uid)
        if row is not None and row.phase in (Phase.BINDING, Phase.ALLOCATED):
            self._refused[uid] = refusal
            self._reservations.mark_claim_rejected(uid)
