"""A clock under which threads run one at a time: what many of them do is the same in each run, down to the last call.

`threads` is entered by the test's own thread. Threads that are started from then on run only inside `run`, each until
it waits on the clock or ends, and then the next. The seed draws which: another one is another interleaving.
A pause in which others may come (`pause`) can be put where a real thread would lose the CPU, such as at each request.

Threads belong to a `Program`, that of the thread that started them. A program can be killed, whereupon nothing of it
runs any more, or stand still for a while. What a pool of threads is given is done at once, by the thread that gives it.
"""

import os
import random
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest import mock

from tests.fakes.clock import FakeClock

_PATIENCE = 60.0  # real seconds after which a turn is a bug: it waits for something else than the clock
_MOST_TURNS = 100_000  # at one moment


class Killed(BaseException):
    """Raised in the threads of a program that was killed, wherever they wait."""


@dataclass(eq=False, slots=True)
class Program:
    """What the threads of one process have in common. `still`: none of them gets a turn."""

    name: str
    still: bool = False
    dead: bool = False

    def check(self) -> None:
        if self.dead:
            raise Killed


@dataclass(eq=False, slots=True)
class _Parked:
    program: Program
    ready: Callable[[], object]
    until: int | None  # nanoseconds of the clock
    turn: threading.Lock = field(default_factory=threading.Lock)


class TurnClock(FakeClock):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self._drawn = random.Random(seed)
        self._parked: list[_Parked] = []
        self._programs: dict[int, Program] = {}  # by thread
        self._over = threading.Lock()  # given back by each turn
        self._over.acquire()
        self._ended: set[threading.Thread] = set()
        self._own = Program("test")
        self._chosen: dict[threading.Thread, Program] = {}
        self.failed: list[BaseException] = []  # what threads ended with

    @contextmanager
    def threads(self) -> Iterator[None]:
        """Until its end threads take turns. Programs that still live then are killed."""
        begin = threading.Thread.start
        with (
            mock.patch.object(threading.Thread, "start", lambda thread: self._start(thread, begin)),
            mock.patch.object(ThreadPoolExecutor, "submit", _submit),
            _one_core(),
        ):
            try:
                yield
            finally:
                for parked in self._parked:
                    parked.program.dead = True
                self.run()

    @contextmanager
    def running_as(self, program: Program) -> Iterator[None]:
        """Threads that the test's own thread starts meanwhile belong to the program."""
        before, self._own = self._own, program
        try:
            yield
        finally:
            self._own = before

    def start(self, program: Program, do: Callable[[], object], name: str = "") -> threading.Thread:
        """Somebody does it, in a thread of the program."""
        thread = threading.Thread(target=do, name=name or program.name, daemon=True)
        self._chosen[thread] = program
        thread.start()
        return thread

    def kill(self, program: Program) -> None:
        program.dead = True
        program.still = False
        self.run()

    def run(self, seconds: float = 0.0, stride: float = 0.0) -> None:
        """All do what they can, and so with time as it passes. It passes in steps of at least `stride`: who waits for
        less comes late.
        """
        end = self._now_ns + round(seconds * 1e9)
        self._take_turns()
        while self._now_ns < end:
            moments = [parked.until for parked in self._parked if parked.until is not None and not parked.program.still]
            soonest = max(min(moments, default=end), self._now_ns + round(stride * 1e9), self._now_ns + 1)
            self._advance(min(end, soonest) - self._now_ns)
            self._take_turns()

    def take_turns(self, turns: int) -> None:
        """So many turns, and no time passes. To stop in the middle of something."""
        for _ in range(turns):
            if not self._take_turn():
                return

    def pause(self) -> None:
        """Others may take their turns first."""
        if threading.get_ident() in self._programs:
            self._park(lambda: True, None)

    def wait_for(self, condition: threading.Condition, ready: Callable[[], bool], seconds: float | None) -> bool:
        program = self._programs.get(threading.get_ident())
        if program is None:
            return super().wait_for(condition, ready, seconds)
        program.check()
        until = None if seconds is None else self._now_ns + round(max(0.0, seconds) * 1e9)
        if ready() or self._reached(until):
            return ready()
        held = condition._release_save()  # type: ignore[attr-defined]
        try:
            self._park(ready, until)
        finally:
            condition._acquire_restore(held)  # type: ignore[attr-defined]
        return ready()

    def join(self, thread: threading.Thread, seconds: float) -> bool:
        never = threading.Condition()
        with never:
            return self.wait_for(never, lambda: thread in self._ended, seconds)

    def _start(self, thread: threading.Thread, begin: Callable[[threading.Thread], None]) -> None:
        program = self._chosen.pop(thread, None) or self._programs.get(threading.get_ident(), self._own)
        parked, run = self._release_turn(program, lambda: True, None), thread.run

        def take_turns() -> None:
            self._programs[threading.get_ident()] = program
            try:
                parked.turn.acquire()
                program.check()
                run()
            except Killed:
                pass
            except BaseException as error:  # noqa: BLE001 - shown by the test
                self.failed.append(error)
            finally:
                del self._programs[threading.get_ident()]
                self._ended.add(thread)
                self._over.release()

        thread.run = take_turns  # type: ignore[method-assign]
        begin(thread)

    def _park(self, ready: Callable[[], object], until: int | None) -> None:
        program = self._programs[threading.get_ident()]
        program.check()
        parked = self._release_turn(program, ready, until)
        self._over.release()
        parked.turn.acquire()
        program.check()

    def _release_turn(self, program: Program, ready: Callable[[], object], until: int | None) -> _Parked:
        parked = _Parked(program, ready, until)
        parked.turn.acquire()
        self._parked.append(parked)
        return parked

    def _take_turns(self) -> None:
        for _ in range(_MOST_TURNS):
            if not self._take_turn():
                return
        raise AssertionError(f"{_MOST_TURNS} turns without an end at one moment")

    def _take_turn(self) -> bool:
        """Whether there was somebody to take one."""
        able = [parked for parked in self._parked if self._able(parked)]
        if not able:
            return False
        parked = able[self._drawn.randrange(len(able))] if len(able) > 1 else able[0]
        self._parked.remove(parked)
        parked.turn.release()
        if not self._over.acquire(timeout=_PATIENCE):
            stacks = [
                "".join(traceback.format_stack(frame))
                for thread, frame in sys._current_frames().items()
                if thread in self._programs
            ]
            raise AssertionError(f"a turn of {parked.program.name} does not end:\n" + "\n".join(stacks))
        return True

    def _able(self, parked: _Parked) -> bool:
        return parked.program.dead or (not parked.program.still and bool(self._reached(parked.until) or parked.ready()))


@contextmanager
def _one_core() -> Iterator[None]:
    """For this thread and those that it starts. Only one of them runs at a time, and from core to core a turn is handed
    over for twice the CPU.
    """
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[os.getpid() % len(cores)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def _submit(pool: ThreadPoolExecutor, do: Callable[..., object], *args: object, **kwargs: object) -> Future[object]:
    future: Future[object] = Future()
    try:
        future.set_result(do(*args, **kwargs))
    except Exception as error:  # noqa: BLE001 - as a pool does
        future.set_exception(error)
    return future
