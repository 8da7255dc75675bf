"""When filter lets the scheduler wait for binds, and when that would only delay it."""

import threading
from contextlib import ExitStack

import pytest

from extender.binding.throttle import BindThrottle
from tests.fakes.clock import FakeClock


def post(throttle: BindThrottle, clock: FakeClock, seconds: float) -> None:
    with throttle.measure_post():
        clock.advance(seconds)


def refused(throttle: BindThrottle, clock: FakeClock, seconds: float) -> None:
    with throttle.measure_post():
        clock.advance(seconds)
        raise OSError("refused")


def under_way_until_it_waits(throttle: BindThrottle) -> int:
    """The number of binds in progress up to which filter does not wait."""
    with ExitStack() as binds:
        for count in range(100):
            if throttle.is_busy:
                return count
            binds.enter_context(throttle.count_bind())
    raise AssertionError("filter never waits")


@pytest.mark.parametrize(("seconds", "binds"), [(0.001, 3), (0.01, 3), (0.04, 10), (0.1, 25)])
def test_a_slow_api_server_needs_more_binds_at_once(seconds, binds, clock):
    throttle = BindThrottle(clock)
    assert under_way_until_it_waits(throttle) == 3
    post(throttle, clock, seconds)
    assert under_way_until_it_waits(throttle) == binds


def test_a_busy_one_is_told_by_its_quickest_answer(clock):
    throttle = BindThrottle(clock)
    post(throttle, clock, 0.005)
    for _ in range(20):
        post(throttle, clock, 0.5)
    assert under_way_until_it_waits(throttle) == 3
    for _ in range(200):
        post(throttle, clock, 0.5)
    assert under_way_until_it_waits(throttle) > 50, "it has become slow"


def test_a_refused_binding_does_not_count(clock):
    throttle = BindThrottle(clock)
    with pytest.raises(OSError, match="refused"):
        refused(throttle, clock, 0.5)
    assert under_way_until_it_waits(throttle) == 3


def test_filter_continues_when_a_bind_has_ended(clock):
    throttle = BindThrottle(clock)
    with ExitStack() as binds:
        for _ in range(3):
            binds.enter_context(throttle.count_bind())
        waits = threading.Thread(target=throttle.delay_filter)
        waits.start()
        clock.until_waiting()
    assert clock.join(waits, 60)


def test_filter_does_not_wait_for_long(clock):
    throttle = BindThrottle(clock)
    with ExitStack() as binds:
        for _ in range(3):
            binds.enter_context(throttle.count_bind())
        began = clock.now()
        throttle.delay_filter()
        assert clock.now() - began == pytest.approx(0.05)
