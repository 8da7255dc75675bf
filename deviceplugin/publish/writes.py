"""Holds back a write that repeats one whose effect the watch has not shown yet.

Shared by all who write in the inventory's rounds: they compare with what was observed, which is a little behind.
"""

from collections.abc import Callable

from cardwise.clock import SYSTEM, Clock

_REPEAT_SECONDS = 2.0
_REMEMBERED = 1000


class Writes:
    """For one thread. `later` is called when a write was held back: it has to be looked at again soon."""

    def __init__(self, later: Callable[[], None], clock: Clock = SYSTEM) -> None:
        self._later = later
        self._clock = clock
        self._written: dict[str, float] = {}  # what -> when

    def may(self, what: str) -> bool:
        """Whether `what` may be written now; if so, it counts as written."""
        now = self._clock.now()
        if now - self._written.get(what, -_REPEAT_SECONDS) < _REPEAT_SECONDS:
            self._later()
            return False
        if len(self._written) > _REMEMBERED:
            self._written.clear()
        self._written[what] = now
        return True
