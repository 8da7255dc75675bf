"""Takes claims back: after a refusal of kube-scheduler, a lost answer, the end of a pod, or a change of the leader.

A claim is deleted and never emptied: a write that names the UID of a deleted object changes nothing, however late the
API server carries it out. The deletion names the version that was read, so it never deletes what was allocated since.
A pod that may have been bound meanwhile is read once more `_SETTLE_SECONDS` later, because kube-scheduler does not read
the claim again before it binds the pod. A bound pod that has no claim gets it back, whoever has deleted it, and also
from a new leader.

All claims of a gang are allocated before the first gate opens, so one open gate is enough to know that the gang has
started: then all gates are opened. A gang that has not started is taken back. To know that, each member with an unknown
outcome is fenced, and the write shows whether its gate is open; no claim is deleted before all of them are fenced.

Example: the gates of A and B were to be opened, and the API server answers neither write. A is fenced, and its gate is
open: A is allocated, and the gate of B is opened. Had both been closed, neither of the late writes could open a gate
any more, and both claims would be deleted.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from typing import Final

import structlog

from cardwise.clock import SYSTEM, Clock
from cardwise.core.api import claims, names
from cardwise.core.values.decoded import Json
from cardwise.core.values.invalid import InvalidRequest
from cardwise.kube import errors, paths
from cardwise.kube.backoff import LEADER_RETRY_AFTER, Backoff
from cardwise.kube.client import KubeClient
from extender.binding import claimwriter
from extender.binding.claimwriter import ClaimFailed, ClaimGrant, ClaimVersion, ClaimWriter, PreparedGrant
from extender.cache.claimed import TakeBack, in_parts
from extender.cache.reservations import Phase
from extender.leadership.fence import fencing_metadata, run_in_parallel
from extender.records.claim import ClaimRecord
from extender.records.podref import PodRef
from extender.state import State

_log = structlog.get_logger(__name__)

_SETTLE_SECONDS: Final = 1.0  # longer than kube-scheduler needs from its choice of a node to the Binding
_RETRY_SECONDS: Final = 1.0
_BOUND_SECONDS: Final = 5.0  # seconds after which a bound pod is read again, if the watch does not show it bound
_UNUSED_SECONDS: Final = 2.0  # seconds between two searches for unused claims
_MAX_BUSY: Final = 64  # pods that threads read: more would only wait
_MAX_UNUSED: Final = 64  # unused claims that are deleted in one step
_FENCE_SECONDS: Final = 10.0  # seconds in which failed deletions are repeated before a leader epoch begins
_TIMEOUT: Final = 2.0
_PARALLEL: Final = 16
_WRITE_SECONDS: Final = 10.0


class _Gate(Enum):
    """The gate of a pod after the pod was fenced."""

    CLOSED = "closed"  # no earlier write opens it
    OPEN = "open"  # the pod's row follows the claim as soon as the watch shows that
    GONE = "gone"  # the pod is gone: the claim is deleted with it, or as an unused one


class ClaimTakeBack:
    """Reads and deletes claims. `step` belongs to one thread.

    on_refused: called with the pod, its node and the reason once a refused claim is deleted.
    on_given_twice: called with a bound pod without a claim, and its node, if another pod has got its GPU.
    """

    def __init__(
        self,
        client: KubeClient,
        state: State,
        writer: ClaimWriter,
        pool: Callable[[], ThreadPoolExecutor],
        *,
        on_refused: Callable[[PodRef, str, str], None] = lambda *_: None,
        on_given_twice: Callable[[PodRef, str], None] = lambda *_: None,
        clock: Clock = SYSTEM,
    ) -> None:
        self._client = client
        self._state = state
        self._writer = writer
        self._pool = pool
        self._on_refused = on_refused
        self._on_given_twice = on_given_twice
        self._clock = clock
        self._not_before: dict[str, float] = {}  # by UID of a pod, when it is read again
        self._busy: set[str] = set()  # the pods that a thread reads
        self._settling: set[str] = set()  # pods that are read once more before their row ends
        # By UID of a member of a gang, the leader epoch in which it was fenced, and its gate was closed.
        self._closed: dict[str, int] = {}
        self._backoffs: dict[str, float] = {}  # by UID: the back-off after the failure that the pod's events have
        self._unused_at = float("-inf")

    def set_backoff(self, uid: str, seconds: float) -> None:
        """Let the pod back off at least so long once its claim is taken back."""
        self._backoffs[uid] = seconds

    def step(self, epoch: int) -> None:
        """Begin to settle the pods whose outcome is unknown or that were refused, and delete unused claims."""
        now = self._clock.now()
        with self._state.claimed_pods() as claimed:
            uids = claimed.uids_to_take_back()
            unused = claimed.unused_claims(_MAX_UNUSED) if now >= self._unused_at else []
        due = [uid for uid in uids if uid not in self._busy and self._not_before.get(uid, now) <= now]
        for part in in_parts(due):
            if len(self._busy) >= _MAX_BUSY:
                break  # the next step continues
            with self._state.claimed_pods() as claimed:
                entries = claimed.take_backs(part)
            for entry in entries:
                self._busy.add(entry.pod.uid)
                self._pool().submit(self._run, entry, epoch)
        if now >= self._unused_at:
            self._unused_at = now + _UNUSED_SECONDS
            for claim in unused:
                self._pool().submit(self._delete_unused, claim, epoch)

    def _run(self, entry: TakeBack, epoch: int) -> None:
        uid = entry.pod.uid
        seconds = _RETRY_SECONDS
        try:
            seconds = self._settle(entry, epoch)
        except (errors.KubeError, ClaimFailed) as error:
            _log.info("failed to take a claim back; trying again", pod=entry.pod.pod, uid=uid, error=str(error))
        except Exception:  # noqa: BLE001 - the outermost frame of a thread's work
            _log.exception("failed to take a claim back", pod=entry.pod.pod, uid=uid)
        finally:
            if seconds:
                self._not_before[uid] = self._clock.now() + seconds
            else:
                self._not_before.pop(uid, None)
            self._busy.discard(uid)

    def _settle(self, entry: TakeBack, epoch: int) -> float:
        """Settle one pod. Returns the seconds until it must be read again; 0 if it is settled."""
        pod = self._writer.read_pod(entry.pod)
        if pod is None:
            return self._end(entry, Phase.TERMINATING)
        name = _claim_name(pod)
        claim = self._writer.read_claim(entry.pod.namespace, name) if name is not None else None
        if pod["spec"].get("nodeName"):
            return self._restore_claim(entry, pod, claim, epoch)
        if entry.refusal is None and claimwriter.is_whole(pod, claim, entry.node, entry.assignment):
            return self._end(entry, Phase.ALLOCATED)
        if _is_only_gate_missing(entry, pod, claim):
            is_started = self._is_gang_started(entry.pod, epoch)
            if is_started is None:
                return _RETRY_SECONDS
            if is_started:
                self._writer.commit(
                    PreparedGrant(_grant_of(entry, pod, epoch), pod=None), self._clock.now() + _WRITE_SECONDS
                )
                return self._end(entry, Phase.ALLOCATED)
        was_bindable = claim is None and name is not None  # another program may have deleted it just now
        if claim is not None and claimwriter.is_claim_of(claim, entry.pod.uid):
            was_bindable = bool((claim.get("status") or {}).get("allocation"))
            read = ClaimVersion.from_manifest(claim)
            self._writer.delete_claim(read, epoch)
            with self._state.claimed_pods() as claimed:
                claimed.mark_claim_deleted(entry.pod.uid, read.uid)
        pod = self._writer.read_pod(entry.pod)
        if pod is None:
            return self._end(entry, Phase.TERMINATING)
        if pod["spec"].get("nodeName"):
            return self._restore_claim(entry, pod, None, epoch)
        if was_bindable and not claimwriter.has_gate(pod) and entry.pod.uid not in self._settling:
            self._settling.add(entry.pod.uid)
            return _SETTLE_SECONDS
        return self._end(entry, None)

    def _end(self, entry: TakeBack, phase: Phase | None) -> float:
        self._settling.discard(entry.pod.uid)
        self._closed.pop(entry.pod.uid, None)
        if entry.refusal is not None and phase is None:
            self._on_refused(entry.pod, entry.node, entry.refusal)
        self._state.end_take_back(entry.pod.uid, phase, seconds=self._backoffs.pop(entry.pod.uid, 0.0))
        return 0.0

    def _restore_claim(self, entry: TakeBack, pod: Json, claim: Json | None, epoch: int) -> float:
        """Allocate the claim of a bound pod again, if the pod is on the node of its reservation. Returns seconds."""
        metadata, phase = pod["metadata"], (pod.get("status") or {}).get("phase")
        needs_claim = not metadata.get("deletionTimestamp") and phase not in names.FINISHED_PHASES
        is_ours = pod["spec"]["nodeName"] == entry.node and claimwriter.read_assignment(pod) == entry.assignment
        if needs_claim and is_ours and not claimwriter.is_whole(pod, claim, entry.node, entry.assignment):
            if entry.assignment is not None and self._state.is_given_twice(entry.node, entry.assignment):
                self._on_given_twice(entry.pod, entry.node)
                return _BOUND_SECONDS
            self._writer.reallocate(_grant_of(entry, pod, epoch), self._clock.now() + _WRITE_SECONDS)
            _log.warning("allocated the claim of a bound pod again", pod=entry.pod.pod, uid=entry.pod.uid)
        with self._state.claimed_pods() as claimed:
            claimed.end_restore(entry.pod.uid)
        return _BOUND_SECONDS

    def _is_gang_started(self, pod: PodRef, epoch: int) -> bool | None:
        """Whether another member of the pod's gang can be bound already; None if that is unknown yet, or if this pod's
        gate is open. Raises KubeError.
        """
        with self._state.claimed_pods() as claimed:
            if not claimed.gang_uids(pod.uid):
                return False
        if self._closed.get(pod.uid) != epoch:
            manifest = self._fence_pod(pod)
            if manifest is None or not claimwriter.has_gate(manifest):
                return None
            self._closed[pod.uid] = epoch
        closed_uids = {uid for uid, closed_in in self._closed.copy().items() if closed_in == epoch}
        with self._state.claimed_pods() as claimed:
            if claimed.is_gang_started(pod.uid):
                return True
            return None if claimed.unread_members(pod.uid, closed_uids) else False

    def _delete_unused(self, claim: ClaimRecord, epoch: int) -> None:
        try:
            pod = self._writer.read_pod(claim.pod) if claim.pod.uid else None
            if pod is not None and (pod.get("status") or {}).get("phase") not in names.FINISHED_PHASES:
                return  # the watch is late
            self._writer.delete_claim(_version_of(claim), epoch)
        except (errors.KubeError, ClaimFailed) as error:
            _log.info("failed to delete a claim; trying again", claim=claim.key, error=str(error))

    # The beginning of a leader epoch.

    def fence_claims(self, still_leads: Callable[[], bool]) -> bool:
        """Delete the claims that a former leader has not finished, so that none of its writes can change anything.

        Returns False if `still_leads` returned False before. Claims that cannot be deleted are taken back later.
        """
        backoff = Backoff(initial=0.05, cap=1.0, max_retry_after=LEADER_RETRY_AFTER)
        until = self._clock.now() + _FENCE_SECONDS
        while still_leads():
            unfinished = list[ClaimRecord]()
            for part in self._pods_in_parts():
                with self._state.claimed_pods() as claimed:
                    unfinished += claimed.claims_to_fence(part)
            failures = self._delete_unfinished(unfinished)
            if not failures or self._clock.now() > until:
                for error in failures[:1]:
                    _log.warning("failed to delete claims of a former leader", claims=len(failures), error=str(error))
                for part in self._pods_in_parts():
                    with self._state.claimed_pods() as claimed:
                        claimed.begin_epoch(part)
                return still_leads()
            self._clock.sleep(backoff.next_delay(max((error.retry_after or 0.0 for error in failures), default=None)))
        return False

    def _pods_in_parts(self) -> Iterator[Sequence[str]]:
        """The UIDs of all pods that may have a row or claim of a former attempt, for one hold of the lock each."""
        with self._state.claimed_pods() as claimed:
            queue, uids = claimed.queue(), claimed.uids_to_take_back()
        return in_parts(list(dict.fromkeys([*(uid for _, _, uid in queue), *uids])))

    def _delete_unfinished(self, unfinished: Sequence[ClaimRecord]) -> list[errors.KubeError]:
        """Fence the pods of these claims, and delete the claims, if no gate of the pod or of its gang is open.

        Returns the errors of the claims that must be tried again.
        """
        gates = run_in_parallel(self._fence_gate, unfinished, _PARALLEL)
        kept_uids = set[str]()
        for claim, gate in zip(unfinished, gates, strict=True):
            if gate is not _Gate.CLOSED and claim.pod.uid not in kept_uids:
                kept_uids.add(claim.pod.uid)
                if gate is not _Gate.GONE:
                    with self._state.claimed_pods() as claimed:
                        kept_uids.update(claimed.gang_uids(claim.pod.uid))
        deleted = [claim for claim in unfinished if claim.allocation is None or claim.pod.uid not in kept_uids]
        outcomes = [*gates, *run_in_parallel(self._delete_claim, deleted, _PARALLEL)]
        return [error for error in outcomes if isinstance(error, errors.KubeError)]

    def _fence_gate(self, claim: ClaimRecord) -> _Gate | errors.KubeError:
        """Fence the claim's pod, if an open gate would let kube-scheduler bind the pod."""
        if claim.allocation is None:
            return _Gate.CLOSED
        try:
            pod = self._fence_pod(claim.pod)
        except errors.KubeError as error:
            return error
        if pod is None:
            return _Gate.GONE
        return _Gate.CLOSED if claimwriter.has_gate(pod) else _Gate.OPEN

    def _delete_claim(self, claim: ClaimRecord) -> errors.KubeError | None:
        path = paths.resourceclaims(claim.namespace, claim.name)
        try:
            self._client.delete(path, _version_of(claim).delete_options, timeout=_TIMEOUT)
        except errors.NotFound:
            pass  # the claim is gone
        except errors.KubeError as error:
            return error
        with self._state.claimed_pods() as claimed:
            claimed.mark_claim_deleted(claim.pod.uid, claim.uid)
        return None

    def _fence_pod(self, pod: PodRef) -> Json | None:
        """Fence the pod, so that no earlier write opens its gate later. Returns the pod after that; None if it is gone.

        Raises KubeError.
        """
        body = {"metadata": fencing_metadata(pod.uid, None, self._clock)}
        try:
            return self._client.patch(paths.pods(pod.namespace, pod.name, "status"), body, timeout=_TIMEOUT)
        except errors.NotFound:
            return None
        except errors.Conflict:
            if self._writer.read_pod(pod) is None:
                return None  # another pod has the name
            raise


def _is_only_gate_missing(entry: TakeBack, pod: Json, claim: Json | None) -> bool:
    """Whether the pod lacks only its gate, and kube-scheduler has not refused it."""
    if entry.refusal is not None or not claimwriter.has_gate(pod):
        return False
    if entry.assignment is None:
        return True  # a member of a gang without a GPU
    return claim is not None and claimwriter.gives(claim, entry.node, entry.assignment)


def _version_of(claim: ClaimRecord) -> ClaimVersion:
    return ClaimVersion(claim.namespace, claim.name, claim.uid, claim.version)


def _grant_of(entry: TakeBack, pod: Json, epoch: int) -> ClaimGrant:
    return ClaimGrant(
        pod=entry.pod,
        claim=claims.read_pod(pod),
        gated=claimwriter.has_gate(pod),
        node=entry.node,
        assignment=entry.assignment,
        env_access=False,
        epoch=epoch,
    )


def _claim_name(pod: Json) -> str | None:
    try:
        return claims.claim_name(pod)
    except InvalidRequest:
        return None
