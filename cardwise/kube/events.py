"""A recorder of Kubernetes Events on users' objects.

`record` returns at once; failures are counted and logged here. Repeats of an Event are counted in one Event object, and
the Events of each object are rate-limited. All namespaces get the same writing time: a namespace with many or slow
Events delays and loses only its own Events.
"""

import threading
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import structlog

from cardwise.clock import SYSTEM, Clock
from cardwise.core.values import wording
from cardwise.kube import errors, paths
from cardwise.kube.client import KubeClient
from cardwise.kube.fairqueueing import FairQueueing, RecentUse
from cardwise.supervision import supervised_thread

EventKind = Literal["Normal", "Warning"]

_log = structlog.get_logger(__name__)

_MAX_REMEMBERED = 4096  # written Events, and rate limits, that are kept in memory; the least recently used are dropped
_TIMEOUT = 5.0  # seconds for one write
_REPEAT_SECONDS = 600.0  # seconds after the last write in which a repeat is counted; later it becomes a new Event


@dataclass(frozen=True, slots=True)
class ObjectRef:
    """The object that an Event is about."""

    api_version: str
    kind: str
    name: str
    namespace: str = ""
    uid: str = ""

    @classmethod
    def pod(cls, namespace: str, name: str, uid: str = "") -> "ObjectRef":
        return cls("v1", "Pod", name, namespace, uid)

    @classmethod
    def node(cls, name: str) -> "ObjectRef":
        # `kubectl describe node` finds Events by uid = name, as the kubelet writes them.
        return cls("v1", "Node", name, "", name)

    def to_wire(self) -> dict[str, str]:
        fields = {
            "apiVersion": self.api_version,
            "kind": self.kind,
            "name": self.name,
            "namespace": self.namespace,
            "uid": self.uid,
        }
        return {key: text for key, text in fields.items() if text}


class Recorder(Protocol):
    """The interface of `EventRecorder` for its users."""

    def record(self, regarding: ObjectRef, reason: str, message: str, type: EventKind = "Normal") -> None:  # noqa: A002
        """Record an Event; returns at once."""


@dataclass(frozen=True, slots=True)
class _PendingEvent:
    regarding: ObjectRef
    namespace: str  # the namespace in which the Event is written
    reason: str
    message: str
    type: EventKind
    at: str


@dataclass(slots=True)
class _WrittenEvent:
    path: str
    count: int
    at: float


@dataclass(slots=True)
class _TokenBucket:
    tokens: float
    at: float


class EventRecorder:
    """Writes Events in a thread, which starts at the first `record`, so a process may fork before.

    Attributes: the numbers of Events `written`, `dropped` and `failed`.

    capacity: the number of Events that may be queued.
    burst: the number of Events that an object may get at once.
    refill_seconds: after the burst, an object may get one Event per `refill_seconds`.
    """

    def __init__(
        self,
        client: KubeClient,
        component: str,
        *,
        instance: str = "",
        capacity: int = 1000,
        burst: int = 25,
        refill_seconds: float = 60.0,
        clock: Clock = SYSTEM,
    ) -> None:
        self.written = 0
        self.dropped = 0
        self.failed = 0
        self._client = client
        self._component = component
        self._instance = instance or component
        self._burst = burst
        self._refill_seconds = refill_seconds
        self._clock = clock
        self._capacity = capacity
        self._pending: dict[str, deque[_PendingEvent]] = {}  # by namespace
        self._queued = 0
        self._fair_order = FairQueueing()
        self._write_seconds: RecentUse[str] = RecentUse(clock)  # the seconds of writing, by namespace
        self._changed = threading.Condition()
        self._written_events: OrderedDict[tuple[ObjectRef, str, str, str], _WrittenEvent] = OrderedDict()
        self._buckets: OrderedDict[tuple[str, str, str], _TokenBucket] = OrderedDict()
        self._thread: threading.Thread | None = None
        self._stopped = False
        self._last_name = 0  # the number in the name of the last Event: its time in nanoseconds

    def record(
        self,
        regarding: ObjectRef,
        reason: str,
        message: str,
        type: EventKind = "Normal",  # noqa: A002
    ) -> None:
        """Record an Event; returns at once and never raises. `reason` is CamelCase; `message` is truncated to 1 KiB."""
        at = self._clock.wall().strftime("%Y-%m-%dT%H:%M:%SZ")
        # Events of cluster-scoped objects are written to "default", where kubectl looks for them.
        namespace = regarding.namespace or "default"
        pending_event = _PendingEvent(regarding, namespace, reason, wording.sanitize_message(message), type, at)
        with self._changed:
            if self._stopped or not self._can_queue(namespace):
                self.dropped += 1
                return
            self._pending.setdefault(namespace, deque()).append(pending_event)
            self._fair_order.enqueue(namespace)
            self._queued += 1
            self._changed.notify()
            if self._thread is None:
                self._thread = supervised_thread(self._run, "events", self._clock)
                self._thread.start()

    def stop(self, timeout: float = 3.0) -> None:
        """Write the queued Events, for at most `timeout` seconds, and accept no more."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        if self._thread is not None:
            self._clock.join(self._thread, timeout)

    def _can_queue(self, namespace: str) -> bool:
        """Whether an Event of the namespace can be queued. If the queue is full, this drops the last Event of the
        namespace with the most queued Events; of namespaces with equally many, of the namespace that has recently used
        the most writing time.
        """
        if self._queued < self._capacity:
            return True
        larger = self._write_seconds.larger_owners(namespace, self._pending)
        for name in larger[:1]:
            self._pending[name].pop()
            if not self._pending[name]:
                del self._pending[name]
            self._queued -= 1
            self.dropped += 1
        return bool(larger)

    def _next_event(self) -> _PendingEvent | None:
        """Wait for the next Event; None when all Events recorded before `stop` are written."""
        with self._changed:
            if not self._pending:
                self._fair_order.clear()
            self._clock.wait_for(self._changed, lambda: bool(self._pending or self._stopped), None)
            if not self._pending:
                return None
            # Namespaces without queued Events are skipped: their Events were dropped.
            namespace = self._fair_order.dequeue(self._pending.__contains__)
            pending_event = self._pending[namespace].popleft()
            if self._pending[namespace]:
                self._fair_order.enqueue(namespace)
            else:
                del self._pending[namespace]
            self._queued -= 1
            return pending_event

    def _run(self) -> None:
        while (pending_event := self._next_event()) is not None:
            began = self._clock.now()
            try:
                self._write(pending_event)
            except errors.KubeError as error:
                self.failed += 1
                _log.warning(
                    "failed to write an Event",
                    reason=pending_event.reason,
                    error=str(error),
                    **_log_fields(pending_event.regarding),
                )
            except Exception:  # noqa: BLE001 - outermost loop; logged and counted
                self.failed += 1
                _log.exception(
                    "failed to write an Event", reason=pending_event.reason, **_log_fields(pending_event.regarding)
                )
            seconds = self._clock.now() - began
            with self._changed:
                self._fair_order.charge_write(pending_event.namespace, seconds)
                self._write_seconds.add_use(pending_event.namespace, seconds)

    def _write(self, pending_event: _PendingEvent) -> None:
        if not self._may_write(pending_event.regarding):
            self.dropped += 1
            return
        key = (pending_event.regarding, pending_event.reason, pending_event.message, pending_event.type)
        now = self._clock.now()
        former = self._written_events.get(key)
        if former is not None and now - former.at < _REPEAT_SECONDS and self._repeat_event(former, pending_event):
            former.at = now
            self._written_events.move_to_end(key)
        else:
            self._written_events[key] = self._create(pending_event, now)
            self._written_events.move_to_end(key)
            _trim_table(self._written_events)
        self.written += 1

    def _repeat_event(self, former: _WrittenEvent, pending_event: _PendingEvent) -> bool:
        try:
            change = {"count": former.count + 1, "lastTimestamp": pending_event.at}
            self._client.patch(former.path, change, "merge", timeout=_TIMEOUT)
        except errors.NotFound:
            return False  # deleted: the API server deletes an Event after an hour
        former.count += 1
        return True

    def _create(self, pending_event: _PendingEvent, now: float) -> _WrittenEvent:
        namespace = pending_event.namespace
        # Names must be unique, even if the clock is set back.
        self._last_name = max(self._last_name + 1, self._clock.wall_ns())
        name = f"{pending_event.regarding.name[:230]}.{self._last_name:x}"
        event: dict[str, Any] = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": namespace},
            "involvedObject": pending_event.regarding.to_wire(),
            "reason": pending_event.reason,
            "message": pending_event.message,
            "type": pending_event.type,
            "count": 1,
            "firstTimestamp": pending_event.at,
            "lastTimestamp": pending_event.at,
            "source": {"component": self._component, "host": self._instance},
            "reportingComponent": self._component,
            "reportingInstance": self._instance,
        }
        self._client.create(paths.events(namespace), event, timeout=_TIMEOUT)
        return _WrittenEvent(paths.events(namespace, name), 1, now)

    def _may_write(self, regarding: ObjectRef) -> bool:
        key = (regarding.kind, regarding.namespace, regarding.uid or regarding.name)
        now = self._clock.now()
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = _TokenBucket(float(self._burst), now)
            _trim_table(self._buckets)
        bucket.tokens = min(float(self._burst), bucket.tokens + (now - bucket.at) / self._refill_seconds)
        bucket.at = now
        self._buckets.move_to_end(key)
        if bucket.tokens < 1.0:
            return False
        bucket.tokens -= 1.0
        return True


def _log_fields(regarding: ObjectRef) -> dict[str, str]:
    """The fields of a log line that identify the object."""
    name = f"{regarding.namespace}/{regarding.name}" if regarding.namespace else regarding.name
    return (
        {"pod": name, "uid": regarding.uid} if regarding.kind == "Pod" else {"resource": regarding.kind, "object": name}
    )


def _trim_table(table: OrderedDict[Any, Any]) -> None:
    while len(table) > _MAX_REMEMBERED:
        table.popitem(last=False)
