"""Bind throttle: how many binds may be under way before filter lets the scheduler wait a little.

kube-scheduler keeps two idle connections for each address (Go's MaxIdleConnsPerHost): a third bind at once is a new
connection with a TLS handshake, which costs both sides more than the bind itself. So filter, which the scheduler asks
for one pod after the other, answers a little later while some are under way. How many that are depends on the API
server: one that takes long for each Binding, though nothing else is asked of it, needs more of them at once for as many
a second. It is told from one that is only busy by the quickest of its answers.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from cardwise.clock import SYSTEM, Clock

_FEW = 3
_LONGEST = 0.05  # seconds that filter waits
_PACE = 0.004  # seconds between two binds of a scheduler that is not held up
_FORGET = 1.02  # by so much a quick answer counts less with each that follows


class BindThrottle:
    """Thread-safe."""

    def __init__(self, clock: Clock = SYSTEM) -> None:
        self._clock = clock
        self._fewer = threading.Condition()
        self._under_way = 0
        self._quickest = 0.0  # seconds, of the last posts; 0: none yet

    @contextmanager
    def bind(self) -> Iterator[None]:
        """A bind is under way."""
        with self._fewer:
            self._under_way += 1
        try:
            yield
        finally:
            with self._fewer:
                self._under_way -= 1
                self._fewer.notify()

    @contextmanager
    def post(self) -> Iterator[None]:
        """The API server is asked to bind; only what it has carried out says how quick it is."""
        began = self._clock.now()
        yield
        took = self._clock.now() - began
        with self._fewer:
            self._quickest = min(took, self._quickest * _FORGET) if self._quickest else took

    def wait(self) -> None:
        """Until few are under way, but not for long."""
        with self._fewer:
            self._clock.wait_for(self._fewer, lambda: not self.busy, _LONGEST)

    @property
    def busy(self) -> bool:
        """So many binds are under way that filter waits."""
        return self._under_way >= max(_FEW, round(self._quickest / _PACE))
