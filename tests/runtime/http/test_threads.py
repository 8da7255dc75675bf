"""Whose call is next: with a clock that the calls move."""

import threading

import pytest

from cardwise.runtime.http.threads import Threads
from tests.fakes.clock import FakeClock
from tests.runtime.http.loopback import PATIENCE, until


class Pool:
    """One thread, which begins with the calls once all are there."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.threads = Threads("x", 1, self.clock)
        self.order: list[str] = []
        self.begin = threading.Event()
        self.threads.submit(lambda: self.begin.wait(PATIENCE), "first")

    def submit(self, name: str, seconds: float, address: str, owner: str = "") -> None:
        def run() -> None:
            self.order.append(name)
            self.clock.advance(seconds)

        self.threads.submit(run, address, owner)

    def run(self) -> list[str]:
        done = threading.Event()
        until(lambda: self.threads._free == 0 and self.threads._running != {}, "that the thread waits")
        self.begin.set()
        until(lambda: not self.threads._waiting and not self.threads._running, "that all are answered")
        done.set()
        return self.order


@pytest.mark.parametrize("strangers", [1, 4, 16])
def test_among_n_strangers_an_api_server_gets_its_part_of_the_time(strangers):
    """1/(N + 1), by time and not by calls: theirs take a hundred times as long."""
    pool = Pool()
    for i in range(strangers):
        for _ in range(20):
            pool.submit(f"stranger{i}", 0.4, f"10.0.0.{i}")
    for _ in range(300):
        pool.submit("api server", 0.004, "10.1.0.1")
    order = pool.run()
    after = order[: len(order) - order[::-1].index("api server")]
    theirs = sum(1 for name in after if name != "api server")
    assert theirs <= strangers * (300 * 0.004 / 0.4 + 2), "as much time each, and the calls that were under way"


def test_work_that_raises_does_not_end_its_thread():
    clock, answered = FakeClock(), threading.Event()
    pool = Threads("x", 1, clock)

    def fail() -> None:
        raise RuntimeError("failed")

    pool.submit(fail)
    until(lambda: not pool._running and not pool._waiting, "that the work has failed")
    pool.submit(answered.set)
    clock.step()
    assert answered.wait(PATIENCE)


def test_a_call_of_an_address_that_was_idle_is_the_next_whatever_waits():
    pool = Pool()
    for i in range(16):
        for _ in range(5):
            pool.submit(f"stranger{i}", 0.4, f"10.0.0.{i}")
    order = pool.order

    def ask_late() -> None:
        pool.submit("api server", 0.004, "10.1.0.1")

    pool.threads.submit(ask_late, "10.2.0.1")  # when its turn comes, the strangers have had some
    pool.run()
    first = order.index("api server")
    assert first <= 17, "before any stranger has its second call"


def test_within_an_address_namespaces_have_the_same_time():
    pool = Pool()
    for _ in range(20):
        pool.submit("fat", 0.4, "10.1.0.1", "fat")
    for _ in range(50):
        pool.submit("fair", 0.004, "10.1.0.1", "fair")
    order = pool.run()
    assert len(order) - order[::-1].index("fair") <= 50 + 2, "all of them after two of the others"


def test_a_call_that_is_being_answered_counts_already():
    """Else an address would have all threads before the first of its calls is over."""
    clock, go_on, running = FakeClock(), threading.Event(), []
    threads = Threads("x", 2, clock)

    def run(name: str) -> None:
        running.append(name)
        go_on.wait(PATIENCE)

    step = threading.Event()
    threads.submit(lambda: run("fat"), "fat")
    threads.submit(lambda: step.wait(PATIENCE), "other")
    until(lambda: len(threads._running) == 2, "that both threads are at work")
    clock.advance(2.0)
    threads.submit(lambda: run("fat"), "fat")
    for _ in range(3):
        threads.submit(lambda: running.append("light"), "light")
    step.set()
    until(lambda: len(running) == 5, "that all have been begun")
    go_on.set()
    assert running == ["fat", "light", "light", "light", "fat"]


def test_a_call_that_waits_can_be_cancelled_and_one_that_is_answered_cannot():
    threads, begun, go_on, ran = Threads("x", 1), threading.Event(), threading.Event(), []
    first = threads.submit(lambda: (begun.set(), go_on.wait(PATIENCE)), "a")
    works = [threads.submit(lambda i=i: ran.append(i), "ab"[i % 2], "xyz"[i % 3]) for i in range(12)]
    assert begun.wait(PATIENCE)
    assert not threads.cancel(first)
    assert all(threads.cancel(works[i]) for i in range(0, 12, 2))
    assert not threads.cancel(works[0])
    go_on.set()
    until(lambda: len(ran) == 6, "that the others are answered")
    assert sorted(ran) == [1, 3, 5, 7, 9, 11]
    until(lambda: not threads._addresses, "that nothing is remembered")
    done = threading.Event()
    threads.submit(done.set, "a", "x")
    assert done.wait(PATIENCE)
