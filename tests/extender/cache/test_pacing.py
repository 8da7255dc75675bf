"""Long work in slices: it is complete and in order, and a waiting thread gets the lock before the end."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from extender.cache.pacing import slices
from tests.fakes.clock import FakeClock


@pytest.mark.parametrize(("count", "expected"), [(0, []), (2, [[0, 1]]), (3, [[0, 1], [2]]), (4, [[0, 1], [2, 3]])])
def test_all_is_handed_out_in_order(count, expected):
    assert list(slices(list(range(count)), 2, FakeClock())) == expected


def test_a_waiting_thread_gets_the_lock_between_two_slices():
    lock, clock, done = threading.Lock(), FakeClock(), []

    def work():
        for some in slices(range(3), 1, clock):
            with lock:
                done.extend(some)

    with ThreadPoolExecutor() as pool:
        working = pool.submit(work)
        for expected in ([0], [0, 1]):
            clock.until_waiting()
            with lock:
                assert done == expected
            clock.step()
        working.result(60)
    assert done == [0, 1, 2]
