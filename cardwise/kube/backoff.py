"""Back-off: how long to wait before the next attempt. The delays grow exponentially to a maximum, with jitter.

All loops that call the API server use this. The jitter spreads the requests of a thousand node agents over time after a
restart of the API server.
"""

import random

LEADER_RETRY_AFTER = 5.0  # seconds; `max_retry_after` for loops of the leader, since all pending pods wait for them
_MAX_RETRY_AFTER = 30.0  # seconds; a proxy that sends a Retry-After of an hour must not stop a loop for an hour


class Backoff:
    """Delays that double after each failure; the actual delay is a random number from 50 % to 100 % of the delay. Not
    thread-safe: each loop has its own.

    initial: the first delay, in seconds.
    cap: the longest delay, in seconds.
    max_retry_after: the maximum of a server's Retry-After, in seconds; a longer one is shortened to this. For loops of
        the leader, see `LEADER_RETRY_AFTER`.
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
        # With jitter, because all clients may have received the same Retry-After.
        return at_least + min(delay, 0.25 * at_least + self._initial)

    def reset(self) -> None:
        self._current = self._initial
