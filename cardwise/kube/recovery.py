"""Recovery: the API server answers one thread of a process again, so the pauses of the others end.

After an outage each reflector waits out its own back-off. Without this, one of them follows the API server again while
the others still decide by what they knew before the outage, for as long as their pause lasts.
"""

import threading
from typing import Protocol


class Retrying(Protocol):
    """A loop that pauses after a failed call to the API server."""

    def retry(self) -> None:
        """End the pause and try again now. From any thread; must return at once."""


class Recovery:
    """The loops of a process that pause after failed calls, so that one that succeeds again can end all pauses.

    Thread-safe. Only a loop whose last call had failed announces a success: an API server that always refuses one kind
    of object, or fails every second call, is not called more often than the back-off of the announcing loop allows.
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
            self._loops = [each for each in self._loops if each is not loop]

    def announce(self, succeeded: object) -> None:
        """End the pauses of all subscribed loops but the one that `succeeded`, whose last call before had failed."""
        with self._lock:
            loops = [each for each in self._loops if each is not succeeded]
        for loop in loops:
            loop.retry()
