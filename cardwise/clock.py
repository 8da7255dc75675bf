"""The clock of a component: the time, and all waits that end by time. Callers pass the clock as a parameter.

Code that waits, sleeps, ages or times out takes a `Clock`. Tests pass a clock that the test itself moves
(tests/fakes/clock.py), so no test has to wait. Production code passes `SYSTEM`.

Public seam: `Clock`. Example, a clock whose waits end at once:

    >>> class FastClock(SystemClock):
    ...     seconds = 0.0
    ...     def now(self): return self.seconds
    ...     def sleep(self, seconds): self.seconds += seconds
    >>> clock = FastClock()
    >>> clock.sleep(60.0)
    >>> clock.now()
    60.0
"""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datetime import datetime


class Clock(ABC):
    """A source of time, with waits that end by this time. Thread-safe. All durations are in seconds."""

    @abstractmethod
    def now(self) -> float:
        """Monotonic seconds, for durations and deadlines within one process."""

    @abstractmethod
    def cpu(self) -> float:
        """The CPU seconds that the calling thread has used."""

    @abstractmethod
    def wall_ns(self) -> int:
        """The time of day in nanoseconds since 1970, for timestamps that other machines read. The time may jump."""

    @abstractmethod
    def wait_for(self, condition: threading.Condition, ready: Callable[[], bool], seconds: float | None) -> bool:
        """As `threading.Condition.wait_for`: the caller holds `condition`; returns the last result of `ready`."""

    @abstractmethod
    def wait(self, event: threading.Event, seconds: float | None) -> bool:
        """As `threading.Event.wait`: wait up to `seconds` (None: no limit) for the event; returns whether it is set."""

    @abstractmethod
    def sleep(self, seconds: float) -> None:
        """Wait for `seconds`."""

    @abstractmethod
    def join(self, thread: threading.Thread, seconds: float) -> bool:
        """As `threading.Thread.join`: wait up to `seconds` for the thread's end; returns whether it has ended."""

    def wall(self) -> "datetime":
        """The time of day in UTC, to the microsecond."""
        from datetime import UTC, datetime  # noqa: PLC0415 - 0.7 MiB of memory, which each share agent would need

        return datetime.fromtimestamp(self.wall_ns() / 1e9, UTC)


class SystemClock(Clock):
    """The machine's clock."""

    def now(self) -> float:
        return time.monotonic()

    def cpu(self) -> float:
        return time.thread_time()

    def wall_ns(self) -> int:
        return time.time_ns()

    def wait_for(self, condition: threading.Condition, ready: Callable[[], bool], seconds: float | None) -> bool:
        return condition.wait_for(ready, seconds)

    def wait(self, event: threading.Event, seconds: float | None) -> bool:
        return event.wait(seconds)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def join(self, thread: threading.Thread, seconds: float) -> bool:
        thread.join(seconds)
        return not thread.is_alive()


class BootClock(SystemClock):
    """The machine's clock that also counts while the machine sleeps: Leases expire during a sleep too."""

    def now(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)


SYSTEM = SystemClock()
BOOT = BootClock()
