"""Back-off: how long to wait before trying again, capped exponential, with jitter.

Every loop that talks to the API server waits like this. The jitter keeps a thousand node agents from coming back in the
same second after an API server restart.
"""

import random

LEADER_RETRY_AFTER = 5.0  # seconds; `longest_retry_after` of a loop of the leader, for which all waiting pods wait
_LONGEST_RETRY_AFTER = 30.0  # seconds; a proxy that names an hour must not stop a loop for an hour


class Backoff:
    """Delays in seconds: `initial`, then twice as much each time up to `cap`, each drawn from its upper half.

    `longest_retry_after`: so many seconds count at most of what a server's Retry-After asks for. A loop of the leader,
    on which the cluster waits, has less than the others.

    Not thread-safe: one for each loop.
    """

    def __init__(
        self, *, initial: float = 0.5, cap: float = 30.0, longest_retry_after: float = _LONGEST_RETRY_AFTER
    ) -> None:
        self._longest_retry_after = longest_retry_after
        self._initial = initial
        self._cap = cap
        self._current = initial

    def next_delay(self, at_least: float | None = None) -> float:
        """Seconds to wait now; `at_least` is what a server's Retry-After asked for."""
        delay = self._current * random.uniform(0.5, 1.0)  # noqa: S311 - spread, not secrecy
        self._current = min(self._cap, 2 * self._current)
        if at_least is None:
            return delay
        at_least = min(at_least, self._longest_retry_after)
        # Spread on top: all clients were told the same number.
        return at_least + min(delay, 0.25 * at_least + self._initial)

    def reset(self) -> None:
        self._current = self._initial
