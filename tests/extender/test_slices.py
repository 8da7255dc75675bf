"""Long work in slices: all of it, in order, and whoever waits for the lock gets it before the end."""

import threading

import pytest

from extender.slices import slices


@pytest.mark.parametrize(("count", "expected"), [(0, []), (2, [[0, 1]]), (3, [[0, 1], [2]]), (4, [[0, 1], [2, 3]])])
def test_all_is_handed_out_in_order(count, expected):
    assert list(slices(list(range(count)), 2)) == expected


def test_who_waits_for_the_lock_gets_it_between_two_slices():
    lock, waits, got = threading.Lock(), threading.Event(), threading.Event()

    def wait():
        waits.set()
        with lock:
            got.set()

    threading.Thread(target=wait, daemon=True).start()
    waits.wait(10)
    for _ in slices(range(5000), 1):  # ten seconds, if it should come to that
        if got.is_set():
            break
        with lock:
            sum(range(10_000))
    assert got.is_set()
