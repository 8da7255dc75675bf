"""A clock that stands still until the test moves it."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime

from cardwise.clock import Clock

# Real seconds after which a wait is a bug of the test: nobody moved the clock, or nobody came to wait. Generous, since
# it only decides how late a broken test fails.
_PATIENCE = 60.0
_MOST_STEPS = 10_000


class FakeClock(Clock):
    """Time moves by `advance` only, and when the thread that made the clock waits on it itself: it could be moved by
    nobody else then. Other threads that wait on it block until the time has come or what they wait for has happened.
    """

    def __init__(self, now: float = 1000.0, wall: datetime = datetime(2026, 1, 1, tzinfo=UTC)) -> None:
        self._now_ns = round(now * 1e9)  # whole numbers: to move to a moment is to be there, not just before
        self._wall_ns = int(wall.timestamp()) * 10**9
        self._owner = threading.get_ident()
        self._lock = threading.Condition()
        self._waiting: dict[int, _Waiting] = {}  # by thread
        self.worked = 0.0  # seconds of CPU, as a test says: work costs nothing by itself

    def now(self) -> float:
        return self._now_ns / 1e9

    def cpu(self) -> float:
        return self.worked

    def wall_ns(self) -> int:
        return self._wall_ns

    def advance(self, seconds: float) -> None:
        """Let time pass. Who waited for less goes on."""
        self._advance(round(seconds * 1e9))

    def _advance(self, nanoseconds: int) -> None:
        with self._lock:
            self._now_ns += nanoseconds
            self._wall_ns += nanoseconds
            # At once, not when the thread runs again: who asks next how many wait must not count those.
            due = [
                self._waiting.pop(thread)
                for thread, waiting in list(self._waiting.items())
                if self._reached(waiting.until)
            ]
        for waiting in due:
            with waiting.condition:
                waiting.condition.notify_all()

    def set_wall(self, wall: datetime) -> None:
        """The time of day jumps, as when an administrator sets it; durations do not notice."""
        with self._lock:
            self._wall_ns = int(wall.timestamp()) * 10**9

    def until_waiting(self, threads: int = 1) -> None:
        """Returns when so many other threads wait on this clock."""
        with self._lock:
            if not self._lock.wait_for(lambda: len(self._still_waiting()) >= threads, _PATIENCE):
                raise AssertionError(f"{len(self._still_waiting())} threads wait on the clock, not {threads}")

    def step(self, threads: int = 1) -> None:
        """When so many other threads wait: to the moment at which the first of them goes on by itself."""
        self.until_waiting(threads)
        with self._lock:
            moments = [waiting.until for waiting in self._still_waiting() if waiting.until is not None]
        if not moments:
            raise AssertionError("those who wait have no limit of time: the clock cannot wake them")
        self._advance(max(0, min(moments) - self._now_ns))

    def step_until(self, ready: Callable[[], object], threads: int = 1) -> None:
        """Let time pass, step by step, until it is so. What takes no time has been done whenever `ready` is asked."""
        for _ in range(_MOST_STEPS):
            self.until_waiting(threads)
            if ready():
                return
            self.step(threads)
        raise AssertionError(f"it did not come true in {_MOST_STEPS} steps")

    def sleep(self, seconds: float) -> None:
        never = threading.Condition()
        with never:
            self.wait_for(never, lambda: False, seconds)

    def join(self, thread: threading.Thread, seconds: float) -> bool:
        """Time does not pass meanwhile: a thread that was told to end is waited for, however long the machine takes."""
        thread.join(_PATIENCE)
        if thread.is_alive():
            raise AssertionError(f"{thread.name} has not ended in {_PATIENCE:.0f} real seconds")
        return True

    def wait(self, event: threading.Event, seconds: float | None) -> bool:
        # The condition inside the event is what `set` notifies; there is no public way to wait for it or for us.
        inside: threading.Condition = event._cond  # type: ignore[attr-defined]
        with inside:
            return self.wait_for(inside, event.is_set, seconds)

    def wait_for(self, condition: threading.Condition, ready: Callable[[], bool], seconds: float | None) -> bool:
        until = None if seconds is None else self._now_ns + round(max(0.0, seconds) * 1e9)
        if ready() or self._reached(until):
            return ready()
        if threading.get_ident() == self._owner:
            if until is None:
                raise AssertionError("the test's own thread would wait for ever")
            self._advance(until - self._now_ns)
            return ready()
        now, since = self._now_ns, time.monotonic()
        with self._registered(_Waiting(until, condition, ready)):
            while not ready() and not self._reached(until):
                condition.wait(_PATIENCE)
                if now != self._now_ns:
                    now, since = self._now_ns, time.monotonic()
                elif until is not None and time.monotonic() - since > _PATIENCE:
                    raise AssertionError(f"waited {_PATIENCE:.0f} real seconds: nobody moved the clock")
        return ready()

    def _reached(self, until: int | None) -> bool:
        return until is not None and until <= self._now_ns

    def _still_waiting(self) -> list["_Waiting"]:
        """Without those whose wait has ended and who only have not run again yet."""
        return [waiting for waiting in self._waiting.values() if not waiting.ready()]

    @contextmanager
    def _registered(self, waiting: "_Waiting") -> Iterator[None]:
        thread = threading.get_ident()
        with self._lock:
            self._waiting[thread] = waiting
            self._lock.notify_all()
        try:
            yield
        finally:
            with self._lock:
                self._waiting.pop(thread, None)


@dataclass(frozen=True, slots=True)
class _Waiting:
    until: int | None  # nanoseconds of the clock
    condition: threading.Condition
    ready: Callable[[], bool]
