"""The use of containers in the last hours: of each minute the peak. Containers that have ended are included."""

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from cardwise.core.values.quantity import MiB
from cardwise.gpus.usagereport import WINDOW_SECONDS, ContainerUsage
from mps.usage.containeruse import ContainerKey, ContainerUse

_MINUTE_SECONDS = 60.0
# Containers that are remembered. A node has some hundred at once; in six hours short Jobs may be many.
_MAX_CONTAINERS = 5000
# Of one pod, by container and GPU: eight containers with eight GPUs each. Further ones are not remembered.
_MAX_PER_POD = 64


@dataclass(slots=True)
class _Entry:
    """What is remembered of a container and a GPU.

    peaks: by minute of the clock, the largest MiB; None if no sample of the minute was known.
    busy_seconds: seconds in which it computed, of the `known_seconds` in which that is known.
    unknown_seconds: seconds in which that is unknown.
    last_busy: when it last computed, or since when that is known; None while it is unknown.
    has_computed: whether it computed at `last_busy`.
    """

    use: ContainerUse
    peaks: deque[tuple[int, MiB | None]] = field(default_factory=deque)
    busy_seconds: float = 0.0
    known_seconds: float = 0.0
    unknown_seconds: float = 0.0
    last_busy: float | None = None
    has_computed: bool = False
    running: bool = True


class PresentUse(NamedTuple):
    """The use of a container by the last sample. recent_peak: the peak of the present and the previous minute in MiB;
    None if unknown.
    """

    key: ContainerKey
    use: ContainerUse
    recent_peak: MiB | None


class History:
    """The use of the containers of a node. Times are of one monotonic clock, in seconds. Not thread-safe.

    A container keeps the workload and the class of its first sample. Users may change the owners and annotations of a
    pod at any time; each change would be a new series.
    """

    def __init__(self, started: float) -> None:
        self._started = started
        self._entries: dict[ContainerKey, _Entry] = {}

    def record(self, uses: Mapping[ContainerKey, ContainerUse], now: float, elapsed: float) -> None:
        """Record a sample of all containers; `elapsed` seconds after the one before."""
        minute = int(now // _MINUTE_SECONDS)
        for key, entry in self._entries.items():
            entry.running = key in uses
        entries_by_pod = Counter(key.pod_uid for key in self._entries)
        for key, use in uses.items():
            if key not in self._entries:
                if entries_by_pod[key.pod_uid] == _MAX_PER_POD:
                    continue
                entries_by_pod[key.pod_uid] += 1
                self._entries[key] = _Entry(use)
            entry = self._entries[key]
            entry.use = replace(use, workload=entry.use.workload, resource_class=entry.use.resource_class)
            _record_peak(entry.peaks, minute, use)
            if use.sm_percent is None:
                entry.unknown_seconds += elapsed
                entry.last_busy = None
            else:
                entry.known_seconds += elapsed
                entry.busy_seconds += elapsed * use.sm_percent / 100
                if use.sm_percent > 0 or entry.last_busy is None:
                    entry.last_busy = now
                    entry.has_computed = use.sm_percent > 0
        self._forget(minute)

    def _forget(self, minute: int) -> None:
        oldest_minute = minute - int(WINDOW_SECONDS // _MINUTE_SECONDS)
        for key, entry in list(self._entries.items()):
            while entry.peaks and entry.peaks[0][0] <= oldest_minute:
                entry.peaks.popleft()
            if not entry.peaks:
                del self._entries[key]
        excess = len(self._entries) - _MAX_CONTAINERS
        if excess > 0:
            for key in [key for key, entry in self._entries.items() if not entry.running][:excess]:
                del self._entries[key]

    def copy(self) -> "History":
        """A copy, for a reader that takes long."""
        copied = History(self._started)
        copied._entries = {key: replace(entry, peaks=entry.peaks.copy()) for key, entry in self._entries.items()}
        return copied

    def present(self) -> Iterator[PresentUse]:
        """The use of the containers of the last sample."""
        for key, entry in self._entries.items():
            if entry.running:
                peaks = (peak for _, peak in list(entry.peaks)[-2:] if peak is not None)
                yield PresentUse(key, entry.use, max(peaks, default=None))

    def observed_seconds(self, now: float) -> float:
        return min(WINDOW_SECONDS, now - self._started)

    def containers(self, now: float) -> Iterator[ContainerUsage]:
        """The remembered use of each container."""
        for key, entry in self._entries.items():
            yield ContainerUsage(
                namespace=key.namespace,
                pod=key.pod,
                container=key.container,
                workload=entry.use.workload,
                gpu=key.uuid,
                granted_mib=entry.use.granted,
                peaks_mib=dict(Counter(int(peak) for _, peak in entry.peaks if peak is not None)),
                busy_percent=100 * entry.busy_seconds / entry.known_seconds
                if entry.known_seconds > entry.unknown_seconds
                else None,
                idle_seconds=None if entry.last_busy is None else now - entry.last_busy,
                idle_is_minimum=not entry.has_computed,
                running=entry.running,
            )


def _record_peak(peaks: deque[tuple[int, MiB | None]], minute: int, use: ContainerUse) -> None:
    known = [mib for mib in (use.memory, use.peak_memory) if mib is not None]
    if peaks and peaks[-1][0] == minute:
        known += [peak for _, peak in (peaks.pop(),) if peak is not None]
    peaks.append((minute, max(known, default=None)))
