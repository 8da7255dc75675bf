"""The bind throttle: delays filter while many binds are in progress.

kube-scheduler keeps two idle connections for each address (Go's MaxIdleConnsPerHost). A third bind at the same time
needs a new connection with a TLS handshake, which costs both sides more than the bind itself. So while several binds
are in progress, filter responds a little later; kube-scheduler calls filter for one pod after the other. The allowed
number of concurrent binds depends on the API server: a slower one needs more concurrent binds for the same number of
binds per second. The fastest of the latest responses shows whether the API server is slow or only busy.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from cardwise.clock import SYSTEM, Clock

_MAX_BINDS_WITHOUT_DELAY = 3  # binds in progress that never delay filter
_MAX_DELAY = 0.05  # maximum seconds that filter waits
_SECONDS_BETWEEN_BINDS = 0.004  # seconds between two binds of a kube-scheduler that is not delayed
_FASTEST_RESPONSE_GROWTH = 1.02  # the factor by which the fastest response time grows with each later response


class BindThrottle:
    """Counts the binds in progress and delays filter. Thread-safe."""

    def __init__(self, clock: Clock = SYSTEM) -> None:
        self._clock = clock
        self._binds_changed = threading.Condition()
        self._under_way = 0
        self._quickest = 0.0  # the fastest response time of the last posts in seconds; 0 before the first

    @contextmanager
    def count_bind(self) -> Iterator[None]:
        """Context manager: counts a bind in progress."""
        with self._binds_changed:
            self._under_way += 1
        try:
            yield
        finally:
            with self._binds_changed:
                self._under_way -= 1
                self._binds_changed.notify()

    @contextmanager
    def measure_post(self) -> Iterator[None]:
        """Context manager: measures the response time of one post. The time is used only if the post succeeds."""
        began = self._clock.now()
        yield
        took = self._clock.now() - began
        with self._binds_changed:
            self._quickest = min(took, self._quickest * _FASTEST_RESPONSE_GROWTH) if self._quickest else took

    def delay_filter(self) -> None:
        """Wait until few enough binds are in progress, at most `_MAX_DELAY` seconds."""
        with self._binds_changed:
            self._clock.wait_for(self._binds_changed, lambda: not self.is_busy, _MAX_DELAY)

    @property
    def is_busy(self) -> bool:
        """Whether so many binds are in progress that filter waits."""
        return self._under_way >= max(_MAX_BINDS_WITHOUT_DELAY, round(self._quickest / _SECONDS_BETWEEN_BINDS))
