"""The use of containers in the last hours: of each minute the peak. Containers that have ended are included."""

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from cardwise.core.values.quantity import MiB
from cardwise.gpus.usagereport import WINDOW_SECONDS, ContainerUsage
from mps.usage.containeruse import ContainerKey, ContainerUse

_MINUTE_SECONDS = 60.0
# Containers that are remembered. A node has some hundred at once; in six hours short Jobs may be many.
_MAX_CONTAINERS = 5000


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


class History:
    """The use of the containers of a node. Times are of one monotonic clock, in seconds. Not thread-safe."""

    def __init__(self, started: float) -> None:
        self._started = started
        self._entries: dict[tuple[ContainerKey, str], _Entry] = {}

    def record(self, uses: Mapping[ContainerKey, ContainerUse], now: float, elapsed: float) -> None:
        """Record a sample of all containers; `elapsed` seconds after the one before."""
        minute = int(now // _MINUTE_SECONDS)
        present = {(key, use.workload) for key, use in uses.items()}
        for entry_key, entry in self._entries.items():
            entry.running = entry_key in present
        for key, use in uses.items():
            entry = self._entries.setdefault((key, use.workload), _Entry(use))
            entry.use = use
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
        for entry_key, entry in list(self._entries.items()):
            while entry.peaks and entry.peaks[0][0] <= oldest_minute:
                entry.peaks.popleft()
            if not entry.peaks:
                del self._entries[entry_key]
        excess = len(self._entries) - _MAX_CONTAINERS
        if excess > 0:
            for entry_key in [key for key, entry in self._entries.items() if not entry.running][:excess]:
                del self._entries[entry_key]

    def recent_peak(self, key: ContainerKey, workload: str) -> MiB | None:
        """The peak of the present and the previous minute in MiB; None if unknown."""
        entry = self._entries.get((key, workload))
        peaks = list(entry.peaks)[-2:] if entry is not None else []
        return max((peak for _, peak in peaks if peak is not None), default=None)

    def observed_seconds(self, now: float) -> float:
        return min(WINDOW_SECONDS, now - self._started)

    def containers(self, now: float) -> Iterator[ContainerUsage]:
        """The remembered use of each container."""
        for (key, workload), entry in self._entries.items():
            yield ContainerUsage(
                namespace=key.namespace,
                pod=key.pod,
                container=key.container,
                workload=workload,
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
