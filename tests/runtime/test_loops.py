"""The times at which a loop runs its step, and failing steps."""

from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
from prometheus_client import CollectorRegistry, Counter
from structlog.testing import capture_logs

from cardwise.kube import errors
from cardwise.runtime import loops
from cardwise.runtime.loops import Loop
from tests.fakes.clock import FakeClock

FAILURES = Counter("failures", "", ["thread"], registry=CollectorRegistry())


class Turns:
    """A loop with the times at which its step ran. `do` is the function of the next steps."""

    def __init__(self, every: float | None = 1.0) -> None:
        self.clock = FakeClock()
        self.times: list[float] = []
        self.do: list[Callable[[], object]] = []
        self.loop = Loop(
            "test",
            self._run_turn,
            failed="it failed",
            failures=FAILURES,
            expected=(errors.KubeError,),
            every=every,
            clock=self.clock,
        )

    def _run_turn(self) -> None:
        self.times.append(round(self.clock.now() - 1000, 3))
        if self.do:
            self.do.pop(0)()

    def start(self, *turns: Callable[[], object]) -> None:
        self.do += turns
        self.loop.start()
        self.clock.until_waiting()

    def step(self) -> list[float]:
        """The times at which the step ran, up to the next event of the clock."""
        self.clock.step()
        self.clock.until_waiting()
        return self.times


def fails(error: Exception) -> Callable[[], object]:
    def fail() -> None:
        raise error

    return fail


def test_failing_logger_does_not_end_the_loop(monkeypatch):
    turns = Turns()
    monkeypatch.setattr(loops, "_log", None)  # each line raises
    turns.start(fails(ValueError()), fails(errors.KubeError(500, "", "")))
    turns.clock.step_until(lambda: len(turns.times) == 4)
    turns.loop.stop()


@pytest.fixture(params=[1.0])
def turns(request) -> Iterator[Turns]:
    timed_loop = Turns(request.param)
    yield timed_loop
    timed_loop.loop.stop()
    assert not timed_loop.loop._thread.is_alive()


def test_steps_run_at_the_start_and_at_the_interval(turns):
    turns.start()
    assert turns.times == [0]
    assert turns.step() == [0, 1]
    assert turns.step() == [0, 1, 2]


def test_step_can_advance_the_next_run_but_not_delay_it(turns):
    turns.start(lambda: turns.loop.run_within(0.1), lambda: turns.loop.run_within(5.0))
    assert turns.step() == [0, 0.1]
    assert turns.step() == [0, 0.1, 1.1]


@pytest.mark.parametrize("turns", [None], indirect=True)
def test_wake_during_a_step_is_not_lost(turns):
    turns.start(turns.loop.wake)
    assert turns.times == [0, 0]
    turns.loop.wake()
    turns.clock.until_waiting()
    assert turns.times == [0, 0, 0]


def test_failed_step_is_retried_after_its_pause(turns):
    refused = errors.TooManyRequests(429, "TooManyRequests", "later", retry_after=3.0)
    with capture_logs() as logs:
        turns.start(fails(refused))
        turns.loop.wake()
        turns.clock.advance(2.9)
        turns.clock.until_waiting()
        assert turns.times == [0]
        turns.step()
    assert 3 <= turns.times[1] <= 4
    assert [(line["log_level"], line["event"]) for line in logs] == [("warning", "it failed")]


def test_unexpected_error_is_counted_and_logged_with_traceback(turns):
    def failures() -> float:
        return FAILURES.labels("test")._value.get()

    before = failures()
    with capture_logs() as logs:
        turns.start(*[fails(TypeError("not what the binding says"))] * 8)
        for _ in range(9):
            turns.step()
    assert failures() == before + 8
    assert [line["exc_info"] for line in logs] == [True] * 8
    pauses = [after - at for at, after in pairwise(turns.times)]
    assert pauses[0] <= 0.2, "the first time it is soon tried again"
    assert max(pauses[:8]) <= 5.0
    assert min(pauses[6:8]) >= 2.5, "and less and less often"
    assert pauses[8] == pytest.approx(1.0), "until it works"
