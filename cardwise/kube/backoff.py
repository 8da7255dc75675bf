"""Back-off: how long to wait before trying again, capped exponential, with jitter.

All loops that call the API server pause like this. The jitter spreads the requests of a thousand node agents after an
API server restart.
"""

import random

LEADER_RETRY_AFTER = 5.0  # seconds; `max_retry_after` for loops of the leader, on which all pending pods wait
_MAX_RETRY_AFTER = 30.0  # seconds; a proxy that names an hour must not stop a loop for an hour


class Backoff:
    """Delays that double, each drawn at random from its upper half. Not thread-safe: one per loop.

    initial: the first delay, in seconds.
    cap: the longest delay, in seconds.
    max_retry_after: seconds of a server's Retry-After that are respected. Loops of the leader, on which the cluster
        waits, have less than the others.
    """

    def __init__(self, *, initial: float = 0.5, cap: float = 30.0, max_retry_after: float = _MAX_RETRY_AFTER) -> None:
        self._max_retry_after = max_retry_after
        self._initial = initial
        self._cap = cap
        self._current = initial

    def next_delay(self, at_least: float | None = None) -> float:
        """The seconds to wait now. `at_least`: the seconds of a server's Retry-After."""
        delay = self._current * random.uniform(0.5, 1.0)  # noqa: S311 - spread, not secrecy
        self._current = min(self._cap, 2 * self._current)
        if at_least is None:
            return delay
        at_least = min(at_least, self._max_retry_after)
        # Jitter is added, because all clients received the same number.
        return at_least + min(delay, 0.25 * at_least + self._initial)

    def reset(self) -> None:
        self._current = self._initial
