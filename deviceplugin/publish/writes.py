"""Holds back a write that repeats an earlier write whose effect the watch has not shown yet.

The passes of `inventory` compare the desired state with the observed state, which lags behind the API server. Without
this limit each pass would repeat the write.
"""

from collections.abc import Callable

from cardwise.clock import SYSTEM, Clock

_REPEAT_SECONDS = 2.0
_MAX_REMEMBERED = 1000


class WriteLimiter:
    """Limits repeated writes. Not thread-safe.

    retry_soon: called when a write is held back.
    """

    def __init__(self, retry_soon: Callable[[], None], clock: Clock = SYSTEM) -> None:
        self._retry_soon = retry_soon
        self._clock = clock
        self._write_times: dict[str, float] = {}  # key -> time in seconds

    def may_write(self, key: str) -> bool:
        """Whether a write may be made now. If so, records the write, so the caller must make it.

        key: identifies the write. Writes with the same key have the same content.
        """
        now = self._clock.now()
        if now - self._write_times.get(key, -_REPEAT_SECONDS) < _REPEAT_SECONDS:
            self._retry_soon()
            return False
        if len(self._write_times) > _MAX_REMEMBERED:
            self._write_times.clear()
        self._write_times[key] = now
        return True
