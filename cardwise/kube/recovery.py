"""Recovery: the API server answers one thread of a process again, so the pauses of the others end.

After an outage each reflector waits out its own back-off. Without this, one of them follows the API server again while
the others still decide by what they knew before the outage, for as long as their pause lasts.
"""

import threading
from typing import Protocol

from cardwise.clock import Clock

# A shorter outage is not announced: pauses grow with the outage, so another loop pauses for about as long at most.
_BRIEF_SECONDS = 1.0


class Retrying(Protocol):
    """A loop that pauses after a failed call to the API server."""

    def retry(self) -> None:
        """End the pause and try again now. From any thread; must return at once.

        The loop makes up for it: if the try fails, the rest of the ended pause is added to the next one, which is not
        ended. So a loop makes no more calls than its own back-off allows, however often others announce a success.
        """


class Recovery:
    """The loops of a process that pause after failed calls, so that one that succeeds again can end all pauses.

    Thread-safe. An API server that refuses one kind of object, or fails every second call, is not called more often
    than the back-off of each loop allows: a success is announced only at the end of an `Outage` that lasted, and each
    loop makes up for a pause that was ended early (`Retrying.retry`).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loops: list[Retrying] = []

    def subscribe(self, loop: Retrying) -> None:
        """Ends the pauses of this loop too, until `unsubscribe`."""
        with self._lock:
            self._loops.append(loop)

    def unsubscribe(self, loop: Retrying) -> None:
        """Does nothing if the loop was not subscribed."""
        with self._lock:
            self._loops = [subscribed for subscribed in self._loops if subscribed is not loop]

    def announce(self, succeeded: object) -> None:
        """End the pauses of all subscribed loops but the one that `succeeded`."""
        with self._lock:
            loops = [subscribed for subscribed in self._loops if subscribed is not succeeded]
        for loop in loops:
            loop.retry()


class Outage:
    """The time since which each call of one loop has failed. Belongs to the thread of that loop."""

    def __init__(self, recovery: Recovery, loop: object, clock: Clock) -> None:
        self._recovery = recovery
        self._loop = loop
        self._clock = clock
        self._since: float | None = None

    def mark_failed(self, since: float | None = None) -> None:
        """A call failed. `since`: when it began to fail, by the clock; the default is now."""
        if self._since is None:
            self._since = self._clock.now() if since is None else since

    def mark_succeeded(self) -> None:
        """A call succeeded, so the outage is over. The other loops of the process may try again, if it lasted."""
        since, self._since = self._since, None
        if since is not None and self._clock.now() - since >= _BRIEF_SECONDS:
            self._recovery.announce(self._loop)
