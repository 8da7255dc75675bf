"""The clock of the tests, held to the machine's clock where both can be asked the same."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from cardwise.clock import SYSTEM, BootClock
from tests.fakes.clock import FakeClock


@pytest.fixture(params=["system", "fake"])
def clock(request):
    return SYSTEM if request.param == "system" else FakeClock()


class TestBothClocks:
    def test_an_event_that_is_set_ends_the_wait_at_once(self, clock):
        event = threading.Event()
        event.set()
        before = clock.now()
        assert clock.wait(event, 3600)
        assert clock.now() - before < 3600

    def test_an_event_that_is_not_set_in_time_is_told(self, clock):
        before = clock.now()
        assert not clock.wait(threading.Event(), 1 / 64)
        assert clock.now() - before >= 1 / 64

    def test_another_thread_ends_a_wait_without_limit(self, clock):
        event, condition, done = threading.Event(), threading.Condition(), []

        def of_condition():
            with condition:
                return clock.wait_for(condition, lambda: bool(done), None)

        with ThreadPoolExecutor() as pool:
            first, second = pool.submit(clock.wait, event, None), pool.submit(of_condition)
            event.set()
            with condition:
                done.append(True)
                condition.notify_all()
            assert first.result(60)
            assert second.result(60)

    def test_a_thread_that_ends_is_joined(self, clock):
        go = threading.Event()
        thread = threading.Thread(target=go.wait)
        thread.start()
        go.set()
        assert clock.join(thread, 60)
        assert not thread.is_alive()

    def test_sleep_takes_its_time_and_both_times_go_on(self, clock):
        before, wall = clock.now(), clock.wall_ns()
        clock.sleep(1 / 64)
        assert clock.now() - before >= 1 / 64
        assert clock.wall_ns() > wall
        assert clock.wall().timestamp() == pytest.approx(clock.wall_ns() / 1e9, abs=1)


def test_the_boot_clock_does_not_go_back():
    clock = BootClock()
    assert clock.now() <= clock.now()
