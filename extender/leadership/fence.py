"""Fencing: changes a pending pod, so that Bindings that were posted before the change have no effect.

Theory of operation. A leader checks its Lease before each Binding. But the process, the network or the API server may
be paused. Then the API server may carry out the request much later, when another extender leads. So each Binding
contains the pod's resourceVersion, and the API server compares this version in the transaction that binds the pod.
After any write to the pod, all Bindings that were posted before the write name an old version. They are refused,
however late they are carried out (docs/design/0011-fencing.md). *Fencing* a pod is such a write: an annotation with the
leader epoch and the time. A new leader fences the pending pods before it reserves its first card. This is not needed if
the former leader released the Lease while no Binding was in progress. A leader also fences a pod before it releases a
reservation whose Binding got no response. If the response to the fencing write shows that the pod is bound, the pod
keeps its share.

Example: leader A reads pod P at version 101 and posts a Binding with version 101, which a paused API server does not
read. B becomes leader and fences P: version 102, without a node. Now B can bind another pod to the card. When the API
server continues, it refuses A's Binding with 409, since P is not at version 101. Had A's Binding come first, P would be
at version 102 with a node, and B's fence would have found it bound.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from functools import partial
from typing import Any, NamedTuple, TypeVar

import structlog

from cardwise.clock import SYSTEM, Clock
from cardwise.core.api import names
from cardwise.core.values.decoded import annotations_of, labels_of
from cardwise.kube import errors, paths
from cardwise.kube.backoff import LEADER_RETRY_AFTER, Backoff
from cardwise.kube.client import KubeClient
from cardwise.kube.events import Recorder
from cardwise.kube.fairqueueing import round_robin
from extender.records.pod import Pod
from extender.records.podref import PodRef

_T = TypeVar("_T")
_R = TypeVar("_R")

_log = structlog.get_logger(__name__)

_TIMEOUT = 2.0
MAX_PARALLEL_FENCES = 16  # parallel writes
_TOTAL_SECONDS = 10.0  # seconds in which failed writes are repeated, although the API server still writes the Lease
_SHORT_TIMEOUT = 0.25  # seconds for a write to a pod whose first attempt starts after `_TOTAL_SECONDS`
_BINDING_ANNOTATIONS = {names.ASSIGNMENT, names.IDX}  # each Binding of a pod with cards sets one of these annotations
_REFUSAL_ERRORS = (errors.Conflict, errors.Forbidden, errors.Invalid, errors.BadRequest)


class PodState(Enum):
    """The present state of a pod that was pending, from a consistent read or from the response to a write."""

    UNBOUND = "unbound"  # the pod has no node; as a result of `fence_pod`: no earlier Binding can bind the pod
    UNFENCED = "unfenced"  # the pod has no node, and the write failed: an earlier Binding may still bind the pod
    BOUND = "bound"
    BOUND_BY_OTHER = "bound-by-other"  # bound by another program
    FINISHED = "finished"  # the pod was bound and has finished: none of its containers will use a card
    DELETED = "deleted"


class FenceSummary(NamedTuple):
    """The result of `fence_pods`.

    landed: whether an earlier Binding of an extender has bound one of the pods.
    unfenced: the UIDs of pods that could not be changed. An earlier Binding may still bind these pods.
    """

    landed: bool
    unfenced: frozenset[str]


class _SkippedPod(errors.Unreachable):
    """The pod was skipped, because too many writes to pods of its namespace are slow."""


class Fence:
    """Fences pods. Thread-safe.

    events: records an event on each pod that cannot be changed.
    """

    def __init__(self, client: KubeClient, clock: Clock = SYSTEM, events: Recorder | None = None) -> None:
        self._client = client
        self._clock = clock
        self._events = events

    def fence_pod(self, pod: PodRef, fencing_token: str | None, *, timeout: float = _TIMEOUT) -> PodState:
        """Fence one pod: write the leader epoch into an annotation. Returns the pod's state.

        fencing_token: the text that identifies the leader epoch; None without a Lease.
        timeout: seconds for each request.

        Raises KubeError if it is unknown whether the pod has changed.

        The write uses the status subresource, since webhooks and policies of other projects rarely match it.
        """
        patch = {"metadata": fencing_metadata(pod.uid, fencing_token, self._clock)}
        path = paths.pods(pod.namespace, pod.name, "status")
        try:
            return _state_of(self._client.patch(path, patch, timeout=timeout), pod.uid)
        except errors.NotFound:
            return PodState.DELETED
        except _REFUSAL_ERRORS as error:
            state = self.read_state(pod, timeout=timeout)
            if state is not PodState.UNBOUND:
                return state
            if isinstance(error, errors.Conflict):
                raise
            # A policy forbids the write, or the pod is too large. This must not stop the binds of all other pods.
            self._report_failure(pod, error)
            return PodState.UNFENCED

    def fence_pods(
        self,
        pods: Sequence[PodRef],
        fencing_token: str | None,
        still_leads: Callable[[], bool],
        *,
        retry: bool = True,
        at_once: int = MAX_PARALLEL_FENCES,
        fenced: set[str] | None = None,
    ) -> FenceSummary | None:
        """Fence all these pods. Returns None if `still_leads` returned False before all pods were tried.

        retry: whether failed writes are repeated, until `_TOTAL_SECONDS` after the start.
        at_once: the number of parallel writes.
        fenced: if given, receives the UIDs of the fenced pods that are not bound.

        A tenant can make pods so large that each write takes seconds. This must not delay the pods of other namespaces.
        So the namespaces take turns, and after too many slow writes the remaining pods of a namespace are skipped.
        """
        backoff, until = (
            Backoff(initial=0.05, cap=1.0, max_retry_after=LEADER_RETRY_AFTER),
            self._clock.now() + _TOTAL_SECONDS,
        )
        has_landed, unfenced, remaining_pods = False, set[str](), round_robin(pods, lambda pod: pod.namespace)
        while still_leads():
            slow = Counter[str]()
            outcomes = run_in_parallel(
                partial(self._try_fence, fencing_token=fencing_token, still_leads=still_leads, slow=slow, until=until),
                remaining_pods,
                at_once,
            )
            if fenced is not None:
                fenced.update(
                    pod.uid
                    for pod, outcome in zip(remaining_pods, outcomes, strict=True)
                    if outcome is PodState.UNBOUND
                )
            if None in outcomes:
                return None
            has_landed |= PodState.BOUND in outcomes or PodState.FINISHED in outcomes
            unfenced.update(
                pod.uid for pod, outcome in zip(remaining_pods, outcomes, strict=True) if outcome is PodState.UNFENCED
            )
            failed = [
                (pod, outcome)
                for pod, outcome in zip(remaining_pods, outcomes, strict=True)
                if isinstance(outcome, errors.KubeError)
            ]
            if not failed or not retry or self._clock.now() > until:
                self._report_failures(failed)
                unfenced.update(pod.uid for pod, _ in failed)
                return FenceSummary(has_landed, frozenset(unfenced)) if still_leads() else None
            remaining_pods = [pod for pod, _ in failed]
            self._clock.sleep(backoff.next_delay(max((error.retry_after or 0.0 for _, error in failed), default=None)))
        return None

    def _try_fence(
        self, pod: PodRef, fencing_token: str | None, still_leads: Callable[[], bool], slow: Counter[str], until: float
    ) -> PodState | errors.KubeError | None:
        """Fence one pod. Returns the error instead of raising it, and None if this extender no longer leads.

        slow: the number of writes without a response in time, by namespace.
        until: the time after which a namespace is skipped after a single slow write.
        """
        if not still_leads():
            return None
        is_late = self._clock.now() > until
        if slow[pod.namespace] >= (1 if is_late else MAX_PARALLEL_FENCES):
            return _SkippedPod(f"too many pods of namespace {pod.namespace} take longer than {_TIMEOUT:.0f} s")
        try:
            return self.fence_pod(pod, fencing_token, timeout=_SHORT_TIMEOUT if is_late else _TIMEOUT)
        except errors.KubeError as error:
            slow[pod.namespace] += isinstance(error, errors.Unreachable)
            return error

    def _report_failures(self, failed: Sequence[tuple[PodRef, errors.KubeError]]) -> None:
        left_out = Counter[str]()
        for pod, error in failed:
            if isinstance(error, _SkippedPod):
                left_out[pod.namespace] += 1
            else:
                self._report_failure(pod, error)
        for namespace, pods in left_out.items():
            _log.warning(
                "skipped the namespace's other pending pods: API writes are too slow",
                namespace=namespace,
                skipped=pods,
            )

    def _report_failure(self, pod: PodRef, error: errors.KubeError) -> None:
        _log.warning("failed to fence a pending pod", pod=pod.pod, uid=pod.uid, error=str(error))
        if self._events is not None:
            text = f"Cardwise cannot change this pod, so an earlier Binding may still bind it; delete the pod: {error}"
            self._events.record(pod.about, "FencingFailed", text, "Warning")

    def read_state(self, pod: PodRef, *, timeout: float = _TIMEOUT) -> PodState:
        """Read the pod's state from the API server, without changing it. Raises KubeError."""
        try:
            return _state_of(self._client.get(paths.pods(pod.namespace, pod.name), timeout=timeout), pod.uid)
        except errors.NotFound:
            return PodState.DELETED


def fencing_metadata(uid: str, fencing_token: str | None, clock: Clock) -> dict[str, Any]:
    """The metadata of a PATCH that fences the pod with this UID. `fencing_token`: as in `Fence.fence_pod`.

    The annotation contains the time, because only a write with a change gives the pod a new resourceVersion.
    """
    annotation = f"{fencing_token}/{clock.wall_ns()}" if fencing_token else str(clock.wall_ns())
    return {"uid": uid, "annotations": {names.LEADER_EPOCH: annotation}}


def _state_of(manifest: dict[str, Any], uid: str) -> PodState:
    if (manifest.get("metadata") or {}).get("uid") != uid:
        return PodState.DELETED
    if not (manifest.get("spec") or {}).get("nodeName"):
        return PodState.UNBOUND
    if Pod(manifest).ended:
        return PodState.FINISHED
    # The Binding of a gang member without cards has only the annotation of the leader epoch, which `fence_pod` writes,
    # too.
    member = bool(labels_of(manifest).get(names.GANG))
    is_ours = member or _BINDING_ANNOTATIONS & annotations_of(manifest).keys()
    return PodState.BOUND if is_ours else PodState.BOUND_BY_OTHER


def run_in_parallel(do: Callable[[_T], _R], subjects: Sequence[_T], at_once: int) -> list[_R]:
    """Call `do` for each subject, for up to `at_once` in parallel. Returns the results in the order of the subjects.

    A single subject is handled in the calling thread.
    """
    if len(subjects) <= 1:
        return [do(subject) for subject in subjects]
    with ThreadPoolExecutor(min(at_once, len(subjects)), thread_name_prefix="fence") as pool:
        return list(pool.map(do, subjects))
