"""Recovery: when a call of one thread succeeds again after an outage, the pauses of the other threads end.

After an outage, each reflector waits for the end of its back-off. Without this, one reflector would be up to date while
others are as old as the outage until their pauses end.
"""

import threading
from typing import Protocol

from cardwise.clock import Clock

# The end of a shorter outage is not announced: pauses grow with the outage, so others pause about as long at most.
_BRIEF_SECONDS = 1.0


class Retrying(Protocol):
    """A loop that pauses after a failed call to the API server."""

    def retry(self) -> None:
        """End the pause and try again now. Called from any thread; must return at once.

        If the try fails, the loop adds the rest of the ended pause to its next pause, which is not ended. So a loop
        makes no more calls than its own back-off allows, however often other loops announce a success.
        """


class Recovery:
    """The loops of a process that pause after failed calls: when one succeeds again, the pauses of all end.

    Thread-safe. An API server that refuses one kind of object, or fails every second call, is not called more often
    than the back-off of each loop allows: a success is announced only at the end of an `Outage` of some length, and
    each loop makes up for a pause that was ended early (`Retrying.retry`).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loops: list[Retrying] = []

    def subscribe(self, loop: Retrying) -> None:
        """Add a loop, whose pauses end too from now on."""
        with self._lock:
            self._loops.append(loop)

    def unsubscribe(self, loop: Retrying) -> None:
        """Remove a loop, if it is subscribed."""
        with self._lock:
            self._loops = [subscribed for subscribed in self._loops if subscribed is not loop]

    def announce(self, succeeded: object) -> None:
        """End the pauses of all subscribed loops but the one that `succeeded`."""
        with self._lock:
            loops = [subscribed for subscribed in self._loops if subscribed is not succeeded]
        for loop in loops:
            loop.retry()


class Outage:
    """The time since which each call of one loop has failed. Used by the thread of that loop only."""

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
        if since is not None and self._clock.now() - since >= _BRIEF_SECONDS:
            self._recovery.announce(self._loop)
