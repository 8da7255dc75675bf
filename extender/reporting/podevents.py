"""Events for pods that wait because their class was deleted or a quota is full, and for quotas whose class is missing.

This module has the texts, and remembers the pods that got an event. Filter and the status writer call its methods, so
the methods return without waiting.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable

from cardwise.clock import SYSTEM, Clock
from cardwise.core.api import names, quotas
from cardwise.kube.events import ObjectRef, Recorder
from cardwise.kube.objects.gpuquotas import QuotaRecord
from extender.cache.quotas import FullEntry
from extender.records.podref import PodRef
from extender.reporting import statuses
from extender.reporting.listers import Listers

_MIN_SECONDS_BETWEEN_EVENTS = 300.0  # minimum seconds between two events of a pod about its quota
_MAX_REMEMBERED_PODS = 50_000  # maximum number of pods whose last event is remembered


class PodEvents:
    """Writes these events. Any thread may call the methods.

    active: returns whether this extender leads; only the leader writes events.
    waiting_for: returns the pending pods that request a class.
    """

    def __init__(
        self,
        events: Recorder,
        listers: Listers,
        *,
        active: Callable[[], bool],
        waiting_for: Callable[[str], Iterable[PodRef]],
        clock: Clock = SYSTEM,
    ) -> None:
        self._events = events
        self._listers = listers
        self._active = active
        self._waiting_for = waiting_for
        self._clock = clock
        self._notified: OrderedDict[str, float] = OrderedDict()  # pods with an event, the oldest event first
        self._lock = threading.Lock()

    def step(self) -> None:
        """Record an event on each pod whose class was deleted since the last call."""
        for name in self._listers.classes.take_deleted():
            if not self._active() or name in self._listers.classes.objects:
                continue  # this extender does not lead, or the class was recreated
            if name in self._listers.cards.automatic_classes():
                continue  # the class is automatic and still has cards, so the extender recreates its object
            text = (
                f"ResourceClass {name} was deleted while the pod waits for it; create the class again, or delete the "
                "pod and request an existing class (kubectl get resourceclasses)"
            )
            for pod in self._waiting_for(name):
                self._events.record(pod.about, "ResourceClassDeleted", text, "Warning")

    def record_quota_wait(self, pod: PodRef, full_entry: FullEntry) -> None:
        """Record an event on the pod, because only this entry of a quota keeps the pod pending. Returns at once."""
        now = self._clock.now()
        with self._lock:
            if now - self._notified.get(pod.uid, float("-inf")) < _MIN_SECONDS_BETWEEN_EVENTS:
                return
            self._notified[pod.uid] = now
            self._notified.move_to_end(pod.uid)
            if len(self._notified) > _MAX_REMEMBERED_PODS:
                self._notified.popitem(last=False)
        self._events.record(pod.about, "WaitingForQuota", _quota_message(full_entry))

    def record_missing_class(self, quota: QuotaRecord, text: str) -> None:
        """Record an event on the quota, because it names a class that does not exist. Returns at once."""
        quota_object = ObjectRef(names.API_VERSION, "GPUQuota", quota.name, quota.namespace, quota.uid)
        self._events.record(quota_object, statuses.CLASS_NOT_FOUND, text, "Warning")


def _quota_message(full_entry: FullEntry) -> str:
    exceeded = quotas.exceeded_limits(full_entry.entry, full_entry.used, full_entry.requested)
    amounts = ", ".join(
        f"{limit.used} of {limit.hard} {limit.unit} used ({limit.requested} requested)" for limit in exceeded
    )
    if full_entry.requested.cards and any(limit.unit == "MiB" for limit in exceeded):
        amounts = f"{amounts}, counting the smallest suitable GPU"
    if any(limit.requested > limit.hard for limit in exceeded):
        ends = "the request exceeds the quota, so the pod starts only if the quota is raised"
    else:
        ends = "the pod starts when other pods of the namespace end or the quota is raised"
    return f"GPUQuota {full_entry.quota} is full for {quotas.entry_title(full_entry.entry)}: {amounts}; {ends}"
