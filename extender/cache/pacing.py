"""Pauses for planners, and readers of many nodes, that compute without the lock.

Python runs one thread at a time. A thread that computes without a pause delays each call of kube-scheduler by some
milliseconds. So planners sleep now and then (docs/design/0032-snapshots.md has the measurements).
"""

from collections.abc import Callable
from typing import Final

from cardwise.clock import Clock

_WORK_SECONDS: Final = 0.004  # seconds of CPU between two pauses
_PAUSE_SECONDS: Final = 0.002


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
        """Sleep if this thread has worked for long since its last pause. Call it in the loops of a planner.

        Returns whether the planner should end.
        """
        if not self._over and self._clock.cpu() - self._slice_start >= _WORK_SECONDS:
            self._clock.sleep(_PAUSE_SECONDS)
            self._over = self._is_over()
            self._slice_start = self._clock.cpu()
        return self._over
