"""The order in which pending pods are nominated: kube-scheduler's order, without the pods of paused namespaces.

Each scheduler has a heap of its namespaces, by their first pods, and each namespace has a heap of its pods. So a
namespace with 60,000 pods pauses, and continues, by moving one entry. The entry of a removed pod stays in the heap of
its namespace: it is dropped when it comes first, and a heap that has many of them is rebuilt, some entries at each
change. No method changes more than `_MAX_DROPPED` entries of pods, because the caller holds the lock of `State`.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Final, NamedTuple

from extender.records.pod import WaitingPod

_MAX_DROPPED: Final = 256  # maximum number of removed pods whose entries one call of `pop` drops
_MAX_DEAD_ENTRIES: Final = 64  # entries of removed pods beside as many of pending pods, above which a heap is rebuilt
_ENTRIES_PER_STEP: Final = 4  # entries that one step of a rebuild moves


def sort_key(pod: WaitingPod) -> tuple[int, str]:
    """The order of kube-scheduler's queue: the highest priority first, then the oldest pod."""
    return -pod.request.priority, pod.created


class _Entry(NamedTuple):
    """A pod in a heap; `number` is different in each entry."""

    key: tuple[int, str]
    number: int
    uid: str
    namespace: str
    scheduler: str


@dataclass(slots=True)
class _NamespaceHeap:
    """The pods of one scheduler and namespace.

    entries, former: two heaps; the entries of `former` move to `entries` while the heap is rebuilt.
    listed: the first entry of the heap, as it is in the scheduler's heap; None while the namespace pauses.
    pending: the number of entries of pods that were not removed.
    """

    entries: list[_Entry] = field(default_factory=list)
    former: list[_Entry] = field(default_factory=list)
    listed: _Entry | None = None
    pending: int = 0

    def first(self) -> _Entry:
        """The first entry. The heap must not be empty."""
        return self._first_heap()[0]

    def pop(self) -> None:
        """Remove the first entry."""
        heappop(self._first_heap())

    def is_full_of_removed(self) -> bool:
        """Whether so many entries are of removed pods that the heap should be rebuilt."""
        return len(self.entries) > 2 * self.pending + _MAX_DEAD_ENTRIES

    def _first_heap(self) -> list[_Entry]:
        if not self.former or (self.entries and self.entries[0] < self.former[0]):
            return self.entries
        return self.former


@dataclass(slots=True)
class _SchedulerHeap:
    """The namespaces of one scheduler.

    heaps: by namespace.
    firsts: a heap of the first entries of namespaces that do not pause; entries that are not `listed` do not count.
    paused: the namespaces that have no entry in `firsts` because they pause.
    """

    heaps: dict[str, _NamespaceHeap] = field(default_factory=dict)
    firsts: list[_Entry] = field(default_factory=list)
    paused: dict[str, None] = field(default_factory=dict)

    def update_first(self, namespace: str, heap: _NamespaceHeap) -> None:
        """List the first entry of the namespace, if it is not listed yet."""
        first = heap.first()
        if namespace in self.paused or heap.listed is first:
            return
        heap.listed = first
        heappush(self.firsts, first)
        if len(self.firsts) > 2 * len(self.heaps) + _MAX_DEAD_ENTRIES:
            self.firsts = [heap.listed for heap in self.heaps.values() if heap.listed is not None]
            heapify(self.firsts)

    def is_listed(self, entry: _Entry) -> bool:
        """Whether this entry of `firsts` is the first one of its namespace."""
        heap = self.heaps.get(entry.namespace)
        return heap is not None and heap.listed is entry


class NominationOrder:
    """The pods that may be nominated. Not thread-safe."""

    def __init__(self) -> None:
        self._numbers = count()
        self._pending: dict[str, _Entry] = {}  # by UID
        self._schedulers: dict[str, _SchedulerHeap] = {}
        self._paused: frozenset[str] = frozenset()

    def add(self, pod: WaitingPod) -> None:
        """Add the pod. Does nothing if the pod was added before, and not removed."""
        if pod.uid in self._pending:
            return
        namespace = pod.ref.namespace
        entry = _Entry(sort_key(pod), next(self._numbers), pod.uid, namespace, pod.scheduler)
        scheduler = self._schedulers.setdefault(pod.scheduler, _SchedulerHeap())
        heap = scheduler.heaps.setdefault(namespace, _NamespaceHeap())
        self._pending[pod.uid] = entry
        heap.pending += 1
        heappush(heap.entries, entry)
        self._rebuild_some(heap)
        scheduler.update_first(namespace, heap)

    def remove(self, uid: str) -> None:
        """Remove the pod, if it was added."""
        entry = self._pending.pop(uid, None)
        if entry is None:
            return
        scheduler = self._schedulers[entry.scheduler]
        heap = scheduler.heaps[entry.namespace]
        heap.pending -= 1
        if heap.pending:
            self._rebuild_some(heap)
            scheduler.update_first(entry.namespace, heap)
            return
        del scheduler.heaps[entry.namespace]
        scheduler.paused.pop(entry.namespace, None)
        if not scheduler.heaps:
            del self._schedulers[entry.scheduler]

    def pop(self, schedulers: Collection[str], paused: frozenset[str]) -> tuple[bool, str | None]:
        """Remove the first pod of these schedulers whose namespace is not in `paused`.

        Returns whether to call again at once, and the pod's UID; None if there is none, or if entries of too many
        removed pods came first.
        """
        if paused != self._paused:
            self._paused = paused
            for scheduler in self._schedulers.values():
                for namespace in [namespace for namespace in scheduler.paused if namespace not in paused]:
                    del scheduler.paused[namespace]
                    scheduler.update_first(namespace, scheduler.heaps[namespace])
        firsts = []
        remaining = _MAX_DROPPED
        for name in schedulers:
            if name in self._schedulers:
                first, remaining = self._find_first(self._schedulers[name], remaining)
                if remaining <= 0:
                    return True, None
                if first is not None:
                    firsts.append(first)
        if not firsts:
            return False, None
        uid = min(firsts).uid
        self.remove(uid)
        return True, uid

    def _find_first(self, scheduler: _SchedulerHeap, remaining: int) -> tuple[_Entry | None, int]:
        """The first pod of the scheduler that does not pause.

        remaining: how many entries of removed pods may be dropped. Also returns how many may be dropped afterwards.
        """
        while scheduler.firsts and remaining > 0:
            first = scheduler.firsts[0]
            if not scheduler.is_listed(first):
                heappop(scheduler.firsts)
                continue
            heap = scheduler.heaps[first.namespace]
            if first.namespace in self._paused:
                heappop(scheduler.firsts)
                heap.listed = None
                scheduler.paused[first.namespace] = None
                continue
            if self._is_pending(first):
                return first, remaining
            heappop(scheduler.firsts)
            while remaining > 0 and not self._is_pending(heap.first()):  # a heap without a pending pod does not exist
                heap.pop()
                remaining -= 1
            scheduler.update_first(first.namespace, heap)
        return None, remaining

    def _is_pending(self, entry: _Entry) -> bool:
        return self._pending.get(entry.uid) is entry

    def _rebuild_some(self, heap: _NamespaceHeap) -> None:
        """Take one step of a rebuild, and begin one if too many entries are of removed pods.

        An entry is taken from the end of `former`, which stays a heap.
        """
        if not heap.former and heap.is_full_of_removed():
            heap.entries, heap.former = [], heap.entries
        for _ in range(min(_ENTRIES_PER_STEP, len(heap.former))):
            entry = heap.former.pop()
            if self._is_pending(entry):
                heappush(heap.entries, entry)
