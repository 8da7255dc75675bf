"""Limits how long work lasts: of planners that compute without the lock, and of work that holds the lock for short
times.

Python runs one thread at a time. A thread that computes without a pause delays each call of kube-scheduler by some
milliseconds. So planners sleep now and then (docs/design/0032-snapshots.md has the measurements).
"""

from collections.abc import Callable
from typing import Final

from cardwise.clock import Clock
from extender.queue.searchpauses import PAUSE_FACTOR

LOCKED_SECONDS: Final = 0.004  # seconds of CPU after which work under the lock starts no further step

_WORK_SECONDS: Final = 0.004  # seconds of CPU between two pauses
# Without a pause, a thread that releases the lock and takes it again at once usually gets it before a waiting thread,
# which takes 50 us to wake.
_PAUSE_SECONDS: Final = 0.002
_MAX_PAUSE: Final = 0.5  # maximum seconds that `pause_seconds` returns


class PlanningStopped(Exception):
    """The planner's time was over before it had a result."""


class Pace:
    """Pauses one thread. Not to be shared by threads.

    is_over: returns whether the planner should end; called at creation, and after each pause.
    """

    def __init__(self, clock: Clock, is_over: Callable[[], bool] = lambda: False) -> None:
        self._clock = clock
        self._is_over = is_over
        self._slice_start = clock.cpu()
        self._over = is_over()

    def pause(self) -> bool:
        """Sleep if this thread has worked for long since its last pause. Planners call this in their loops.

        Returns whether the planner should end.
        """
        if not self._over and self._clock.cpu() - self._slice_start >= _WORK_SECONDS:
            pause(self._clock)
            self._over = self._is_over()
            self._slice_start = self._clock.cpu()
        return self._over


def stop_when(is_over: Callable[[], bool]) -> Callable[[], None]:
    """A pace for planners that raises `PlanningStopped` when `is_over` returns True."""

    def check() -> None:
        if is_over():
            raise PlanningStopped

    return check


def stop_after_cpu(clock: Clock, cpu_seconds: float) -> Callable[[], None]:
    """A pace for a planner during a call. It never sleeps. It raises `PlanningStopped` once the thread has used
    `cpu_seconds` of CPU time.
    """
    until = clock.cpu() + cpu_seconds
    return stop_when(lambda: clock.cpu() >= until)


def pause(clock: Clock) -> None:
    """Sleep for a moment between two holds of the lock, so that waiting calls get the lock."""
    clock.sleep(_PAUSE_SECONDS)


def pause_seconds(cost: float) -> float:
    """The seconds to pause after unsuccessful work of `cost` seconds. With these pauses, such work takes a tenth of the
    time.
    """
    return min(_MAX_PAUSE, PAUSE_FACTOR * cost)
