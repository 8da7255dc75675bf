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


class TestFakeClock:
    def test_no_time_passes_while_a_thread_is_joined(self):
        clock = FakeClock()
        thread = threading.Thread(target=lambda: None)
        thread.start()
        before = clock.now()
        assert clock.join(thread, 0)  # though it may not have run at all yet
        assert clock.now() == before

    def test_a_thread_sleeps_until_the_clock_is_moved_far_enough(self):
        clock = FakeClock()
        with ThreadPoolExecutor() as pool:
            sleeping = pool.submit(clock.sleep, 10)
            clock.until_waiting()
            clock.advance(9.5)
            assert not sleeping.done()
            clock.advance(0.5)
            sleeping.result(60)

    def test_steps_end_when_it_is_so(self):
        clock, slept = FakeClock(now=0), []

        def work():
            while len(slept) < 4:
                clock.sleep(2)
                slept.append(clock.now())

        with ThreadPoolExecutor() as pool:
            working = pool.submit(work)
            clock.step_until(lambda: len(slept) == 3)
            assert slept == [2, 4, 6]
            clock.advance(2)
            working.result(60)

    def test_a_step_goes_to_the_next_moment_at_which_somebody_wakes(self):
        clock = FakeClock(now=0)
        with ThreadPoolExecutor() as pool:
            short, long = pool.submit(clock.sleep, 2), pool.submit(clock.sleep, 5)
            clock.step(threads=2)
            short.result(60)
            assert clock.now() == 2
            assert not long.done()
            clock.step()
            long.result(60)
            assert clock.now() == 5

    def test_the_time_of_day_can_jump_without_the_other(self):
        clock = FakeClock()
        now, wall = clock.now(), clock.wall()
        clock.set_wall(wall.replace(year=2030))
        assert clock.wall().year == 2030
        assert clock.now() == now

    def test_its_own_thread_is_not_left_waiting_for_ever(self):
        with pytest.raises(AssertionError, match="for ever"):
            FakeClock().wait(threading.Event(), None)


def test_the_boot_clock_does_not_go_back():
    clock = BootClock()
    assert clock.now() <= clock.now()
