"""The order of calls, with a clock that the calls move."""

import threading

import pytest

from cardwise.runtime.http import serving
from cardwise.runtime.http.threads import CallThreads
from tests.fakes.clock import FakeClock
from tests.runtime.http.loopback import PATIENCE, until


class Pool:
    """A pool of one thread, which begins when all calls are queued."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.threads = CallThreads("x", 1, self.clock)
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
def test_api_server_gets_its_share_among_n_flooding_addresses(strangers):
    """The share is 1/(N + 1) of the time, not of the calls: those of the others take a hundred times as long."""
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
    pool = CallThreads("x", 1, clock)

    def fail() -> None:
        raise RuntimeError("failed")

    pool.submit(fail)
    until(lambda: not pool._running and not pool._waiting, "that the work has failed")
    pool.submit(answered.set)
    clock.step()
    assert answered.wait(PATIENCE)


def test_call_of_an_idle_address_is_next():
    pool = Pool()
    for i in range(16):
        for _ in range(5):
            pool.submit(f"stranger{i}", 0.4, f"10.0.0.{i}")
    order = pool.order

    def ask_late() -> None:
        pool.submit("api server", 0.004, "10.1.0.1")

    pool.threads.submit(ask_late, "10.2.0.1")  # before its first call, the other addresses have had some time
    pool.run()
    first = order.index("api server")
    assert first <= 17, "before any stranger has its second call"


def test_namespaces_of_an_address_get_the_same_time():
    pool = Pool()
    for _ in range(20):
        pool.submit("fat", 0.4, "10.1.0.1", "fat")
    for _ in range(50):
        pool.submit("fair", 0.004, "10.1.0.1", "fair")
    order = pool.run()
    assert len(order) - order[::-1].index("fair") <= 50 + 2, "all of them after two of the others"


def test_running_call_is_charged_already():
    """Otherwise an address would get all threads before its first call ends."""
    clock, go_on, running = FakeClock(), threading.Event(), []
    threads = CallThreads("x", 3, clock)

    def run(name: str) -> None:
        running.append(name)
        go_on.wait(PATIENCE)

    step = threading.Event()
    threads.submit(lambda: run("fat"), "fat")
    threads.submit(lambda: step.wait(PATIENCE), "other")
    threads.submit(lambda: go_on.wait(PATIENCE), "another")
    until(lambda: len(threads._running) == 3, "that all threads are at work")
    clock.advance(2.0)
    threads.submit(lambda: run("fat"), "fat")
    for _ in range(3):
        threads.submit(lambda: running.append("light"), "light")
    step.set()
    until(lambda: len(running) == 5, "that all have been begun")
    go_on.set()
    assert running == ["fat", "light", "light", "light", "fat"]


class Blocking:
    """A pool whose calls of `block` run until `release`."""

    def __init__(self, max_threads: int) -> None:
        self.threads = CallThreads("x", max_threads)
        self.begun: list[str] = []
        self.release = threading.Event()

    def block(self, name: str, address: str, owner: str = "") -> None:
        def run() -> None:
            self.begun.append(name)
            self.release.wait(PATIENCE)

        self.threads.submit(run, address, owner)

    def is_answered(self, address: str, owner: str = "") -> bool:
        """Whether a call that is submitted now is answered while the others block."""
        done = threading.Event()
        self.threads.submit(done.set, address, owner)
        return done.wait(PATIENCE)


@pytest.fixture
def blocking():
    pools = []

    def make(max_threads):
        pools.append(Blocking(max_threads))
        return pools[-1]

    yield make
    for pool in pools:
        pool.release.set()


@pytest.mark.parametrize("max_threads", [2, 3, 4])
@pytest.mark.parametrize("owners", [1, 10])
def test_an_address_never_has_the_last_thread(blocking, max_threads, owners):
    """Four reviews from one address took all four threads, and a pod of the API server waited a minute."""
    pool = blocking(max_threads)
    for i in range(10):
        pool.block("fat", "10.0.0.1", f"n{i % owners}")
    for i in range(3):
        assert pool.is_answered("10.1.0.1", f"n{i}")
    until(lambda: len(pool.begun) == max(1, max_threads - (1 if owners > 1 else 2)), "that its calls have begun")
    pool.release.set()
    until(lambda: len(pool.begun) == 10, "that all are answered at last")
    until(lambda: not pool.threads._addresses, "that nothing is remembered")


@pytest.mark.parametrize("address", ["", "10.1.0.1"])
def test_an_owner_leaves_a_thread_for_the_other_owners_of_its_address(blocking, address):
    pool = blocking(4)
    for _ in range(10):
        pool.block("fat", address, "fat")
    for i in range(3):
        assert pool.is_answered(address, f"fair{i}")
    assert pool.is_answered("10.2.0.1")
    assert pool.begun == ["fat"] * 2
    pool.release.set()
    until(lambda: len(pool.begun) == 10, "that all are answered at last")


def test_two_prompt_calls_of_an_owner_run_at_a_time(blocking):
    """Bindings of one namespace in a row take longer than the second that an API server waits."""
    pool = blocking(serving._PROMPT_THREADS)
    pool.block("binding", "10.0.0.1", "x")
    until(lambda: pool.begun, "that it has begun")
    assert not pool.threads.is_busy("10.0.0.1", "x")


FLOWS = [("a", "x"), ("a", "y"), ("b", "x"), ("", "")]


@pytest.mark.parametrize(
    ("calls", "begun", "busy"),
    [
        ([("a", "x")], 1, []),
        ([("a", "x")] * 2, 2, [("a", "x")]),
        ([("a", "x")] * 3, 2, FLOWS),  # the third waits
        ([("", "x")] * 3, 2, FLOWS),
        ([("a", "")] * 3, 3, [("a", "x"), ("a", "y")]),
        ([("a", "")] * 4, 3, FLOWS),
        ([("", "")] * 3, 3, []),
        ([("", "")] * 4, 4, FLOWS),
    ],
)
def test_threads_are_busy_while_any_call_waits_and_for_an_owner_or_address_that_has_all_its_places(
    blocking, calls, begun, busy
):
    """Of four threads two are for an owner and three for an address; the others are free."""
    pool = blocking(4)
    for address, owner in calls:
        pool.block("call", address, owner)
    until(lambda: len(pool.begun) == begun, "that all have begun that may")
    assert [flow for flow in FLOWS if pool.threads.is_busy(*flow)] == busy
    pool.release.set()
    until(lambda: not any(pool.threads.is_busy(*flow) for flow in FLOWS), "that all are answered")


def test_cancelled_calls_do_not_block_an_address(blocking):
    pool = blocking(3)
    for _ in range(2):
        pool.block("fat", "10.0.0.1")
    until(lambda: len(pool.begun) == 2, "that it has all threads that it may have")
    waiting = [pool.threads.submit(lambda: None, "10.0.0.1") for _ in range(3)]
    assert all(map(pool.threads.cancel, waiting))
    assert pool.is_answered("10.1.0.1")
    pool.release.set()
    until(lambda: not pool.threads._addresses, "that nothing is remembered")
    assert pool.is_answered("10.0.0.1")


def test_waiting_call_can_be_cancelled_and_running_call_cannot():
    threads, begun, go_on, ran = CallThreads("x", 1), threading.Event(), threading.Event(), []
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
