"""The state's lock. It tells for how long it has been held, so that others notice a turn that never ends.

A thread that stands while it has the state leaves the process alive in all but its work. Others would wait behind it,
calls of kube-scheduler a second each, and the Lease would be renewed for ever.
"""

import math
import threading
from typing import Final

from cardwise.clock import Clock

# Seconds of one turn: from then on
REFUSE: Final = 0.5  # calls on the threads of filter are refused at once; kube-scheduler would wait a second for each
YIELD: Final = 3.0  # the Lease is not renewed, so that another extender may take over
STUCK: Final = 10.0  # the process counts as hung, and is replaced

# Asked several times a second whether it lives, a process that was not asked for so long stood still itself (SIGSTOP,
# a paused machine): what a turn took until then says nothing.
STOOD_STILL: Final = 2.0


class StateLock:
    """Used as a `threading.Lock` in a `with`."""

    def __init__(self, clock: Clock) -> None:
        self._lock = threading.Lock()
        self._clock = clock
        self._since = math.inf

    def __enter__(self) -> None:
        self._lock.acquire()
        self._since = self._clock.now()

    def __exit__(self, *_: object) -> None:
        self._since = math.inf
        self._lock.release()

    def held(self) -> float:
        """Seconds that the turn under way has taken; 0 where there is none. Waits for nobody."""
        return max(0.0, self._clock.now() - self._since)
