"""The clock that a part lives by: the time, and every wait that ends with time. It is handed in.

Whatever waits, sleeps, ages or times out takes a `Clock`, so a test hands in one that moves when it says so
(tests/fakes/clock.py), and no test has to wait for "long enough". In production it is `SYSTEM`.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import UTC, datetime


class Clock(ABC):
    """Time to read and to wait by. Thread-safe. All durations are in seconds."""

    @abstractmethod
    def now(self) -> float:
        """Seconds since some moment; never goes back. For durations and deadlines within one process."""

    @abstractmethod
    def cpu(self) -> float:
        """Seconds of CPU that the calling thread has had. For work that is put off where it was costly."""

    @abstractmethod
    def wall_ns(self) -> int:
        """The time of day, in nanoseconds since 1970. For what other machines read; it may jump."""

    @abstractmethod
    def wait_for(self, condition: threading.Condition, ready: Callable[[], bool], seconds: float | None) -> bool:
        """As `threading.Condition.wait_for`: the caller holds `condition`; returns what `ready` said last."""

    @abstractmethod
    def wait(self, event: threading.Event, seconds: float | None) -> bool:
        """As `threading.Event.wait`: until it is set, for `seconds` at most (None: no limit); whether it is set."""

    @abstractmethod
    def sleep(self, seconds: float) -> None:
        """Let `seconds` pass."""

    @abstractmethod
    def join(self, thread: threading.Thread, seconds: float) -> bool:
        """As `threading.Thread.join`: until it has ended, for `seconds` at most; whether it has."""

    def wall(self) -> datetime:
        """The time of day in UTC, to the microsecond."""
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
    """The machine's clock, which runs on while the machine sleeps. For what others count on meanwhile: a Lease."""

    def now(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)


SYSTEM = SystemClock()
BOOT = BootClock()
