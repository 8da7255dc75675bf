"""When filter lets the scheduler wait for binds, and when that would only hold it up."""

import threading
from contextlib import ExitStack

import pytest

from extender.calm import Calm


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def post(calm: Calm, clock: Clock, seconds: float) -> None:
    with calm.post():
        clock.now += seconds


def refused(calm: Calm, clock: Clock, seconds: float) -> None:
    with calm.post():
        clock.now += seconds
        raise OSError("refused")


def under_way_until_it_waits(calm: Calm) -> int:
    """How many binds may be under way while filter does not wait."""
    with ExitStack() as binds:
        for count in range(100):
            if calm.busy:
                return count
            binds.enter_context(calm.bind())
    raise AssertionError("filter never waits")


@pytest.mark.parametrize(("seconds", "binds"), [(0.001, 3), (0.01, 3), (0.04, 10), (0.1, 25)])
def test_a_slow_api_server_needs_more_binds_at_once(seconds, binds):
    clock = Clock()
    calm = Calm(clock)
    assert under_way_until_it_waits(calm) == 3
    post(calm, clock, seconds)
    assert under_way_until_it_waits(calm) == binds


def test_a_busy_one_is_told_by_its_quickest_answer():
    clock = Clock()
    calm = Calm(clock)
    post(calm, clock, 0.005)
    for _ in range(20):
        post(calm, clock, 0.5)
    assert under_way_until_it_waits(calm) == 3
    for _ in range(200):
        post(calm, clock, 0.5)
    assert under_way_until_it_waits(calm) > 50, "it has become slow"


def test_a_refused_binding_says_nothing():
    clock = Clock()
    calm = Calm(clock)
    with pytest.raises(OSError, match="refused"):
        refused(calm, clock, 0.5)
    assert under_way_until_it_waits(calm) == 3


def test_filter_goes_on_when_a_bind_has_ended():
    calm = Calm()
    with ExitStack() as binds:
        for _ in range(3):
            binds.enter_context(calm.bind())
        waits = threading.Thread(target=calm.wait)
        waits.start()
    waits.join(10)
    assert not waits.is_alive()
