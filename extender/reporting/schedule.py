"""Chooses which changed object is written next, and limits the writes per second to one object and to all objects.

Pure: the time is an argument. `statuswriter` and `podgroupwriter` have the threads.
"""

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Final, NamedTuple

from cardwise.kube.fairqueueing import FairQueueing

_CLUSTER_SCOPED: Final = ""  # the queue of objects without a namespace, which no namespace can be named


class Key(NamedTuple):
    """An object: its kind, and its key within the kind."""

    kind: str
    key: str


@dataclass(slots=True)
class _Written:
    """The last write to an object: its content, its time, and how often equal content was written before."""

    content: object
    at: float
    repeats: int = 0


class WriteSchedule:
    """The objects to write.

    gaps: the minimum seconds between two writes to the same object, by kind.

    Each kind gets the same writing time. Within a kind each namespace gets the same writing time (`FairQueueing`). The
    namespace is the part of a key before "/"; all keys without "/" form one namespace. Each object is checked again
    after its write. A write without effect is repeated, each time after a longer pause.
    """

    _MAX_GAP = 60.0  # maximum seconds between two equal writes, if the watch never shows their effect

    def __init__(self, gaps: Mapping[str, float]) -> None:
        self._gaps = gaps
        self._ready_keys: dict[str, dict[str, dict[Key, None]]] = {kind: {} for kind in gaps}  # by namespace
        self._kinds = FairQueueing()
        self._fair_queues = {kind: FairQueueing() for kind in gaps}
        self._current: tuple[Key, float] | None = None  # the object that is being written, and since when
        self._later: list[tuple[float, int, Key]] = []
        self._put_off: dict[Key, float] = {}
        self._order = count()
        self._written: dict[Key, _Written] = {}

    def __len__(self) -> int:
        return sum(len(keys) for ready in self._ready_keys.values() for keys in ready.values()) + len(self._put_off)

    def enqueue(self, key: Key, now: float) -> None:
        """Record that the object may have to be written."""
        last_write = self._written.get(key)
        if last_write is not None and now < last_write.at + self._gaps[key.kind]:
            self._enqueue_at(key, last_write.at + self._gaps[key.kind])
        elif key not in self._put_off or self._put_off[key] > now:
            self._put_off.pop(key, None)
            self._make_ready(key)

    def enqueue_all(self, keys: Iterable[Key], now: float) -> None:
        for key in keys:
            self.enqueue(key, now)

    def next_key(self, now: float) -> Key | None:
        """An object to check now, or None. The caller then calls `mark_written`, `mark_failed` or `mark_settled`."""
        while self._later and self._later[0][0] <= now:
            at, _, key = heapq.heappop(self._later)
            if self._put_off.get(key) == at:  # else the object was enqueued again for an earlier time
                del self._put_off[key]
                self._make_ready(key)
        for kind, ready in self._ready_keys.items():
            if not ready:
                self._fair_queues[kind].clear()
        if not any(self._ready_keys.values()):
            self._kinds.clear()
            return None
        kind = self._kinds.dequeue()
        ready = self._ready_keys[kind]
        namespace = self._fair_queues[kind].dequeue()
        key = next(iter(ready[namespace]))
        del ready[namespace][key]
        if ready[namespace]:
            self._fair_queues[kind].enqueue(namespace)
        else:
            del ready[namespace]
        if ready:
            self._kinds.enqueue(kind)
        self._current = key, now
        return key

    def mark_written(self, key: Key, content: object, now: float) -> None:
        """Record that the object was written. The watch will show whether the write had an effect."""
        self._charge_time(key, now)
        last_write = self._written.get(key)
        repeats = last_write.repeats + 1 if last_write is not None and last_write.content == content else 0
        self._written[key] = _Written(content, now, repeats)
        self._enqueue_at(key, now + min(self._gaps[key.kind] * 2**repeats, self._MAX_GAP))

    def mark_failed(self, key: Key, now: float, seconds: float) -> None:
        """Record that the write failed. The write is retried after this many seconds, or when the object is enqueued
        again.
        """
        self._charge_time(key, now)
        self._written[key] = _Written(None, now)
        self._enqueue_at(key, now + seconds)

    def mark_settled(self, key: Key) -> None:
        """Record that the object needs no write, because its status is current or the object was deleted."""
        self._written.pop(key, None)

    def _make_ready(self, key: Key) -> None:
        self._ready_keys[key.kind].setdefault(_queue_of(key), {})[key] = None
        self._fair_queues[key.kind].enqueue(_queue_of(key))
        self._kinds.enqueue(key.kind)

    def _charge_time(self, key: Key, now: float) -> None:
        if self._current is not None and self._current[0] == key:
            self._fair_queues[key.kind].charge_write(_queue_of(key), now - self._current[1])
            self._kinds.charge_write(key.kind, now - self._current[1])
            self._current = None

    def _enqueue_at(self, key: Key, at: float) -> None:
        if key not in self._ready_keys[key.kind].get(_queue_of(key), ()) and at < self._put_off.get(key, float("inf")):
            self._put_off[key] = at
            heapq.heappush(self._later, (at, next(self._order), key))


def _queue_of(key: Key) -> str:
    """The fair queue of the object: its namespace. All objects without a namespace share one queue."""
    return key.key.partition("/")[0] if "/" in key.key else _CLUSTER_SCOPED


class WriteRate:
    """Limits the writes per second. Writes that were not used may be used later, up to the writes of half a second."""

    def __init__(self) -> None:
        self._tokens = 1.0
        self._last_write: float | None = None

    def allows_write(self, now: float, rate: float) -> bool:
        """Whether a write is allowed now. `rate`: the allowed writes per second since the last call."""
        if self._last_write is not None:
            self._tokens = min(rate / 2, self._tokens + (now - self._last_write) * rate)
        self._last_write = now
        return self._tokens >= 1.0

    def record_write(self) -> None:
        """Record that a write was made."""
        self._tokens -= 1.0
