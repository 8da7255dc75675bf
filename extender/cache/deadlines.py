"""Times by key, of which the next ones are found without a walk over all of them."""

import heapq
from typing import Final

_FOREVER: Final = float("inf")
_MIN_REBUILD: Final = 64  # entries of the heap below which outdated ones are not worth a rebuild


class Deadlines:
    """A time for each key, in seconds of the caller's clock. Not thread-safe."""

    def __init__(self) -> None:
        self._times: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []  # also outdated entries: those that `_times` does not confirm

    def __contains__(self, key: str) -> bool:
        return key in self._times

    def set(self, key: str, time: float) -> None:
        """Set the key's time, in place of an earlier one."""
        if self._times.get(key) == time:
            return
        self._times[key] = time
        heapq.heappush(self._heap, (time, key))
        if len(self._heap) > max(_MIN_REBUILD, 2 * len(self._times)):
            self._heap = [(time, key) for key, time in self._times.items()]
            heapq.heapify(self._heap)

    def discard(self, key: str) -> None:
        """Forget the key, if it is known."""
        self._times.pop(key, None)

    def next(self) -> float:
        """The earliest time; infinity without a key."""
        while self._heap and self._times.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else _FOREVER

    def pop_due(self, now: float) -> str | None:
        """Forget and return the key with the earliest time; None if that time is after `now`."""
        if self.next() > now:
            return None
        key = heapq.heappop(self._heap)[1]
        del self._times[key]
        return key
