"""Evicts pods in which the audit has found a violation, one at a time and a limited number per hour.

If a driver reports wrong data, or cgroups have an unknown form, the audit may be wrong about all pods of a node at
once. Even then it must not evict all pods of the node.
"""

from collections import Counter, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import structlog

from cardwise.kube import errors
from cardwise.kube.client import KubeClient
from cardwise.kube.events import EventRecorder, ObjectRef
from cardwise.kube.pods.eviction import evict
from mps import metrics
from mps.host.pods import PodView

_log = structlog.get_logger(__name__)

EVICTIONS_PER_HOUR = 6  # of each node: a driver that reports wrong data of all pods must not empty the node
_HOUR = 3600.0
_MAX_WAIT_SECONDS = 600.0  # maximum wait until the evicted pod has ended: its grace period may be a year


class EvictionBudget:
    """Limits the evictions of a node: one at a time, and `per_hour` in any hour. Pure; times are parameters."""

    def __init__(self, per_hour: int) -> None:
        self._per_hour = per_hour
        self._evictions: deque[tuple[float, str]] = deque()  # time and namespace of the evictions in the last hour
        self.last_uid = ""  # UID of the last evicted pod
        self._wait_until = 0.0  # the latest time until which the next eviction waits for the end of this pod

    def withheld_reason(self, active_uids: Collection[str], now: float) -> str | None:
        """The obstacle to an eviction now; None if a pod may be evicted.

        active_uids: the UIDs of the node's pods that have not ended.
        now: seconds of the caller's clock.
        """
        self._forget_old_evictions(now)
        if len(self._evictions) >= self._per_hour:
            return f"this node has used its {self._per_hour} evictions per hour"
        is_waiting = self.last_uid in active_uids and now < self._wait_until
        return "the pod that was evicted last has not ended yet" if is_waiting else None

    def count_by_namespace(self, now: float) -> Counter[str]:
        """The number of evictions in the last hour, by namespace."""
        self._forget_old_evictions(now)
        return Counter(namespace for _, namespace in self._evictions)

    def record_eviction(self, uid: str, namespace: str, now: float) -> None:
        self._evictions.append((now, namespace))
        self._wait_until = now + _MAX_WAIT_SECONDS
        self.last_uid = uid

    def _forget_old_evictions(self, now: float) -> None:
        while self._evictions and now - self._evictions[0][0] >= _HOUR:
            self._evictions.popleft()


@dataclass(frozen=True, slots=True)
class Violator:
    """A pod to evict.

    since: when its violation began, in seconds of the caller's clock.
    reason: the text for its event.
    """

    pod: PodView
    since: float
    reason: str


class Evictor:
    """Evicts pods with violations. Not thread-safe.

    An eviction that the budget withholds is reported, and tried again at the next audit.
    """

    def __init__(self, client: KubeClient, events: EventRecorder, per_hour: int) -> None:
        self._client = client
        self._events = events
        self._budget = EvictionBudget(per_hour)
        self._reported: set[tuple[str, str]] = set()  # UID and reason of the evictions that the last audit withheld

    def evict(self, violators: Sequence[Violator], active_uids: Collection[str], now: float) -> None:
        """Evict violators, as far as the budget allows. Call this at each audit.

        Sorts the pods by the number of their namespace's evictions in the last hour, fewest first, then by the age of
        the violation, oldest first. So the violators of one namespace, however many, do not protect a violator in
        another namespace.

        violators: all pods whose violation has lasted long enough.
        active_uids: the UIDs of the node's pods that have not ended.
        """
        previously_reported, self._reported = self._reported, set()
        evictions = self._budget.count_by_namespace(now)
        for violator in sorted(violators, key=lambda violator: (evictions[violator.pod.namespace], violator.since)):
            if violator.pod.uid == self._budget.last_uid:
                continue  # the pod is being evicted, but the watch has not shown it yet
            reason = self._budget.withheld_reason(active_uids, now)
            if reason is None:
                self._try_evict(violator, now)
                continue
            self._reported.add((violator.pod.uid, reason))
            if (violator.pod.uid, reason) not in previously_reported:
                self._report_withheld(violator, reason)

    def _try_evict(self, violator: Violator, now: float) -> None:
        pod = violator.pod
        try:
            evict(self._client, pod.namespace, pod.name, pod.uid)
        except (errors.NotFound, errors.Conflict):
            return  # the pod was deleted; another pod may have its name
        except errors.TooManyRequests as error:
            metrics.AUDIT_EVICTIONS.labels("budget").inc()
            _log.warning(
                "a disruption budget withholds an eviction; trying again", pod=pod.pod, uid=pod.uid, error=str(error)
            )
        except errors.KubeError as error:
            metrics.AUDIT_EVICTIONS.labels("error").inc()
            _log.warning("failed to evict a pod; trying again", pod=pod.pod, uid=pod.uid, error=str(error))
        else:
            self._budget.record_eviction(pod.uid, pod.namespace, now)
            metrics.AUDIT_EVICTIONS.labels("evicted").inc()
            _log.warning("evicted a pod", pod=pod.pod, uid=pod.uid, reason=violator.reason)
            self._record(pod, "AuditEvicted", f"evicted, since the violation lasted (--audit=evict): {violator.reason}")

    def _report_withheld(self, violator: Violator, reason: str) -> None:
        pod = violator.pod
        metrics.AUDIT_EVICTIONS.labels("withheld").inc()
        _log.warning("withheld the eviction of a pod", pod=pod.pod, uid=pod.uid, reason=reason)
        self._record(pod, "AuditEvictionWithheld", f"eviction withheld (--audit=evict): {reason}: {violator.reason}")

    def _record(self, pod: PodView, reason: str, text: str) -> None:
        self._events.record(ObjectRef.pod(pod.namespace, pod.name, pod.uid), reason, text, "Warning")
