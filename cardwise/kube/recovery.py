"""Recovery: when a call of one thread succeeds again after an outage, the pauses of the other threads end.

Otherwise, after an outage, one reflector would soon be up to date. The data of others would stay old until the pauses
of their back-off end.
"""

import threading
from typing import Protocol

from cardwise.clock import Clock

# Seconds. The end of a shorter outage is not announced: the pauses of other loops are then short as well.
_MIN_ANNOUNCED_OUTAGE_SECONDS = 1.0


class Retrying(Protocol):
    """A loop that pauses after a failed call to the API server."""

    def retry(self) -> None:
        """End the pause and try again now. Called from any thread; must return at once.

        If this attempt fails, the loop adds the rest of the ended pause to the next pause. `retry` does not end that
        next pause. So a loop makes no more calls than its own back-off allows, however often other loops announce a
        success.
        """


class Recovery:
    """The loops of a process that pause after failed calls. When a loop succeeds again, the pauses of all loops end.

    Thread-safe. No loop makes more calls than its back-off allows, even if the API server refuses one kind of object or
    fails every second call. For this reason, only the end of an `Outage` of at least `_MIN_ANNOUNCED_OUTAGE_SECONDS` is
    announced. Also, each loop later makes up for a pause that was ended early (`Retrying.retry`).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loops: list[Retrying] = []

    def subscribe(self, loop: Retrying) -> None:
        """Add a loop. From now on, `announce` also ends its pauses."""
        with self._lock:
            self._loops.append(loop)

    def unsubscribe(self, loop: Retrying) -> None:
        """Remove a loop, if it is subscribed."""
        with self._lock:
            self._loops = [subscribed for subscribed in self._loops if subscribed is not loop]

    def announce(self, succeeded: object) -> None:
        """End the pauses of all subscribed loops except `succeeded`, the loop whose call succeeded."""
        with self._lock:
            loops = [subscribed for subscribed in self._loops if subscribed is not succeeded]
        for loop in loops:
            loop.retry()


class Outage:
    """The outage of one loop: since when all its calls have failed. Only the thread of that loop may use this."""

    def __init__(self, recovery: Recovery, loop: object, clock: Clock) -> None:
        self._recovery = recovery
        self._loop = loop
        self._clock = clock
        self._since: float | None = None

    def mark_failed(self, since: float | None = None) -> None:
        """Record a failed call. `since`: when calls began to fail, by the clock; default: now."""
        if self._since is None:
            self._since = self._clock.now() if since is None else since

    def mark_succeeded(self) -> None:
        """Record a successful call, which ends the outage. After a longer outage, the other loops retry at once."""
        since, self._since = self._since, None
        if since is not None and self._clock.now() - since >= _MIN_ANNOUNCED_OUTAGE_SECONDS:
            self._recovery.announce(self._loop)
