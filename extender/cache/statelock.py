"""The state's lock. It measures for how long a thread holds the lock, to detect a critical section that never ends.

Without this check, a thread that hangs in a critical section would stop all work, but the process would look alive.
Each call of kube-scheduler would wait a second, and the process would renew the Lease for ever.
"""

import math
import threading
from typing import Final

from cardwise.clock import Clock

# Seconds of one critical section after which the named reaction begins.
REFUSE_SECONDS: Final = (
    0.5  # calls on filter's threads are refused at once: otherwise kube-scheduler would wait a second for each call
)
YIELD_SECONDS: Final = 3.0  # the Lease is not renewed, so that another extender may take over
STUCK_SECONDS: Final = 10.0  # the process counts as hung, and is replaced

# The liveness check runs several times a second. If it did not run for this long, the whole process was paused
# (SIGSTOP, a paused machine), and the duration of a critical section is meaningless.
PAUSED_SECONDS: Final = 2.0


class StateLock:
    """A lock for use in a `with` statement, as `threading.Lock`."""

    def __init__(self, clock: Clock) -> None:
        self._lock = threading.Lock()
        self._clock = clock
        self._held_since = math.inf

    def __enter__(self) -> None:
        self._lock.acquire()
        self._held_since = self._clock.now()

    def __exit__(self, *_: object) -> None:
        self._held_since = math.inf
        self._lock.release()

    def held_seconds(self) -> float:
        """For how many seconds the present holder has held the lock; 0 while it is free. Never waits."""
        return max(0.0, self._clock.now() - self._held_since)
