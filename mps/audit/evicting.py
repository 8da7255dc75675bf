"""Evicts pods in which the audit has found a violation, one after the other and so many an hour.

An audit may be wrong about all pods of a node at once (a driver that tells nonsense, cgroups of a shape that nobody has
seen), and must not empty it then.
"""

from collections import deque
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

_HOUR = 3600.0
_ENDS = 600.0  # seconds that the next eviction waits for the evicted pod to end: its grace period may be a year


class Allowance:
    """How many pods of a node may go: one at a time, `per_hour` in any hour. Pure; times are given in."""

    def __init__(self, per_hour: int) -> None:
        self._per_hour = per_hour
        self._spent: deque[float] = deque()
        self.last = ""  # UID of the one that went last
        self._until = 0.0  # when its end is awaited no more

    def withheld(self, there: Collection[str], now: float) -> str:
        """Why none may go now, "" if one may. `there` are the UIDs of the node's pods that have not ended."""
        while self._spent and now - self._spent[0] >= _HOUR:
            self._spent.popleft()
        if len(self._spent) >= self._per_hour:
            return f"this node has had its {self._per_hour} evictions of an hour (--audit-evict-per-hour)"
        waits = self.last in there and now < self._until
        return "the pod that was evicted before it has not ended yet" if waits else ""

    def spend(self, uid: str, now: float) -> None:
        self._spent.append(now)
        self._until = now + _ENDS
        self.last = uid


@dataclass(frozen=True, slots=True)
class Violator:
    """A pod that has to go, since when (seconds of the caller's clock), and why, for its event."""

    pod: PodView
    since: float
    why: str


class Evictor:
    """For one thread. Pods that may not go yet are told so, and tried again at the next look."""

    def __init__(self, client: KubeClient, events: EventRecorder, per_hour: int) -> None:
        self._client = client
        self._events = events
        self._allowance = Allowance(per_hour)
        self._told: set[tuple[str, str]] = set()  # UID, and why it was withheld

    def evict(self, violators: Sequence[Violator], there: Collection[str], now: float) -> None:
        """`there` as in `Allowance.withheld`. All that have to go are given at each look."""
        told, self._told = self._told, set()
        for violator in sorted(violators, key=lambda one: one.since):
            if violator.pod.uid == self._allowance.last:
                continue  # it goes, and we have not heard of it yet
            why = self._allowance.withheld(there, now)
            if not why:
                self._try(violator, now)
                continue
            self._told.add((violator.pod.uid, why))
            if (violator.pod.uid, why) not in told:
                self._tell_withheld(violator, why)

    def _try(self, violator: Violator, now: float) -> None:
        pod = violator.pod
        try:
            evict(self._client, pod.namespace, pod.name, pod.uid)
        except (errors.NotFound, errors.Conflict):
            return  # it is gone, and one of the same name is another
        except errors.TooManyRequests as error:
            metrics.AUDIT_EVICTIONS.labels("budget").inc()
            _log.warning(
                "a disruption budget keeps a pod; it is tried again", pod=pod.pod, uid=pod.uid, error=str(error)
            )
        except errors.KubeError as error:
            metrics.AUDIT_EVICTIONS.labels("error").inc()
            _log.warning("cannot evict a pod; it is tried again", pod=pod.pod, uid=pod.uid, error=str(error))
        else:
            self._allowance.spend(pod.uid, now)
            metrics.AUDIT_EVICTIONS.labels("evicted").inc()
            _log.warning("pod evicted", pod=pod.pod, uid=pod.uid, why=violator.why)
            self._record(pod, "AuditEvicted", f"evicted, since it went on (--audit-evict): {violator.why}")

    def _tell_withheld(self, violator: Violator, why: str) -> None:
        pod = violator.pod
        metrics.AUDIT_EVICTIONS.labels("withheld").inc()
        _log.warning("a pod's eviction is withheld", pod=pod.pod, uid=pod.uid, why=why)
        self._record(pod, "AuditEvictionWithheld", f"has to go (--audit-evict), but {why}: {violator.why}")

    def _record(self, pod: PodView, reason: str, text: str) -> None:
        self._events.record(ObjectRef.pod(pod.namespace, pod.name, pod.uid), reason, text, "Warning")
