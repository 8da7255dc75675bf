"""Threads that answer calls in a fair order: each client address gets the same time.

Fairness is measured by time instead of calls, since one call may take a hundred times as long as another. Example with
four threads: the calls of address A take 400 ms each, those of address B 4 ms; B has a hundred calls answered for each
call of A. Calls compete for the CPU and for threads. So a call is charged the larger one of two amounts: its CPU
seconds, and its seconds on a thread divided by the number of threads.

If N + 1 addresses always have waiting calls, each address gets 1/(N + 1) of the time, however many connections, calls
or namespaces it has. An API server calls for the whole cluster, but has the same weight as other addresses. Without
a client certificate, the API server cannot be told apart from other clients, and a client can put any namespace into
its call. So neither an API server nor a namespace gets extra time. But the call of an address that uses less than its
share starts as soon as a thread is free. Of T threads, the calls of one address occupy at most T - 1, so a thread is
left for the first call of another address. In the same way, the calls of one owner occupy at most T - 2 threads. So a
thread is left for another owner of the same address. So if N other addresses attack, pods are created without extra
delay, provided that the API server's calls need less than 1/(N + 1) of the CPU. If certificates are required
(`webhook.clientCA`), other addresses cannot call.
"""

import threading
from collections import Counter, deque
from collections.abc import Callable
from typing import Final

from cardwise.clock import SYSTEM, Clock
from cardwise.kube.fairqueueing import FairQueueing
from cardwise.supervision import supervised_thread

# Maximum number of threads that wait for the next call of their connection; at least two never wait so.
_MAX_STAYING_THREADS: Final = 16
_MIN_CHARGE: Final = 0.0005  # the minimum seconds that are charged for a call


class QueuedCall:
    """A call that waits for a thread, has one or is done."""

    __slots__ = ("address", "charged_seconds", "owner", "run", "started_at")

    def __init__(self, run: Callable[[], None], address: str, owner: str) -> None:
        self.run = run
        self.address = address
        self.owner = owner
        self.started_at: float | None = None  # the time when the call got a thread
        self.charged_seconds = _MIN_CHARGE  # the seconds that were charged to its address


class _Address:
    """The calls of one address, in a fair order of their owners (namespaces).

    max_of_owner: maximum number of calls of one owner that run at a time; the owner "" has no limit.
    running_calls: the running calls of each owner.
    """

    def __init__(self, max_of_owner: int) -> None:
        self.fair_order = FairQueueing(min_charge=_MIN_CHARGE)
        self.waiting_calls: dict[str, deque[QueuedCall]] = {}
        self.running_calls = Counter[str]()
        self._max_of_owner = max_of_owner

    @property
    def is_ready(self) -> bool:
        """Whether a waiting call may begin."""
        return any(map(self._is_ready_owner, self.waiting_calls))

    def _is_ready_owner(self, owner: str) -> bool:
        return owner in self.waiting_calls and not self.has_max_of(owner)

    def has_max_of(self, owner: str) -> bool:
        """Whether the owner has as many running calls as it may have."""
        return bool(owner) and self.running_calls[owner] >= self._max_of_owner

    def add_call(self, call: QueuedCall) -> None:
        self.waiting_calls.setdefault(call.owner, deque()).append(call)
        self.fair_order.enqueue(call.owner)

    def remove_call(self, call: QueuedCall) -> bool:
        """Remove a waiting call. Returns False if it was not waiting."""
        queue = self.waiting_calls.get(call.owner, ())
        if call not in queue:
            return False
        self.waiting_calls[call.owner].remove(call)
        if not queue:
            del self.waiting_calls[call.owner]
        return True

    def begin_call(self) -> QueuedCall:
        """Remove the next call from the queue and return it as running. A call must be ready."""
        owner = self.fair_order.dequeue(self._is_ready_owner)
        queue = self.waiting_calls[owner]
        call = queue.popleft()
        if queue:
            self.fair_order.enqueue(owner)
        else:
            del self.waiting_calls[owner]
        self.running_calls[owner] += 1
        return call

    def finish_call(self, call: QueuedCall) -> None:
        """Record that a running call has ended. Then the owner's next call may begin."""
        self.running_calls[call.owner] -= 1
        if not self.running_calls[call.owner]:
            del self.running_calls[call.owner]
        if call.owner in self.waiting_calls:
            self.fair_order.enqueue(call.owner)


class CallThreads:
    """Threads that answer calls, started as needed. They are daemon threads: a hanging one does not prevent the exit.

    With more calls than threads, all client addresses get the same time, and within an address all owners of its calls.
    At least one thread is never used by calls of the same address, and at least two are never used by calls of the same
    owner. So other addresses and owners do not wait for calls that take long. Two kinds of calls are not limited: calls
    from clients with a certificate, which have no address here, and calls without an owner.
    """

    def __init__(self, name: str, max_threads: int, clock: Clock = SYSTEM) -> None:
        self.staying = threading.Semaphore(max(0, min(_MAX_STAYING_THREADS, max_threads - 2)))
        self._name = name
        self._clock = clock
        self._max_threads = self._unstarted = max_threads
        self._max_of_address, self._max_of_owner = max(1, max_threads - 1), max(1, max_threads - 2)
        self._free = 0
        self._fair_order = FairQueueing(min_charge=_MIN_CHARGE)
        self._addresses: dict[str, _Address] = {}
        self._running: dict[QueuedCall, None] = {}
        self._waiting = 0
        self._changed = threading.Condition()

    def is_busy(self, address: str = "", owner: str = "") -> bool:
        """Whether a call waits, or whether a call of the address and owner would have to wait if it were submitted now.

        A call may have to wait even if threads are free, because the running calls of its owner or address have reached
        the limit.
        """
        with self._changed:
            if self._waiting or not (self._free or self._unstarted):
                return True
            calls = self._addresses.get(address)
            return calls is not None and (self._has_max_of(address) or calls.has_max_of(owner))

    def submit(self, run: Callable[[], None], address: str = "", owner: str = "") -> QueuedCall:
        """Queue a call for the next free thread. `owner`: the owner of the call, for example a namespace."""
        call = QueuedCall(run, address, owner)
        with self._changed:
            self._addresses.setdefault(address, _Address(self._max_of_owner)).add_call(call)
            self._fair_order.enqueue(address)
            self._waiting += 1
            if self._waiting <= self._free or not self._unstarted:
                self._changed.notify()
                return call
            self._unstarted -= 1
        supervised_thread(self._run, f"{self._name}_{self._unstarted}", self._clock).start()
        return call

    def cancel(self, call: QueuedCall) -> bool:
        """Remove a call from the queue. Returns False if a thread answers the call or has answered it."""
        with self._changed:
            address = self._addresses.get(call.address)
            if address is None or not address.remove_call(call):
                return False
            self._waiting -= 1
            self._forget_if_done(call.address)
            return True

    def _run(self) -> None:
        while True:
            with self._changed:
                self._free += 1
                self._clock.wait_for(self._changed, self._has_ready_call, None)
                self._free -= 1
                call = self._begin_next()
            cpu_before = self._clock.cpu()
            try:
                call.run()
            finally:
                with self._changed:
                    self._finish(call, self._clock.cpu() - cpu_before)
                del call  # frees the connection of the call: the next call may come much later

    def _begin_next(self) -> QueuedCall:
        now = self._clock.now()
        for running_calls in self._running:  # else an address could get all threads before its first call ends
            self._charge(running_calls, self._used_seconds(running_calls, now))
        name = self._fair_order.dequeue(self._is_ready)
        address = self._addresses[name]
        call = address.begin_call()
        call.started_at = now
        self._running[call] = None
        self._waiting -= 1
        if address.waiting_calls:
            self._fair_order.enqueue(name)
        return call

    def _has_ready_call(self) -> bool:
        # The search is short: each address that is not ready has running calls, so there are no more of them than
        # threads.
        return self._waiting > 0 and any(map(self._is_ready, self._addresses))

    def _is_ready(self, name: str) -> bool:
        """Whether a waiting call of the address may begin. The address may have no calls left."""
        return name in self._addresses and not self._has_max_of(name) and self._addresses[name].is_ready

    def _has_max_of(self, name: str) -> bool:
        """Whether the address has as many running calls as it may have."""
        return bool(name) and self._addresses[name].running_calls.total() >= self._max_of_address

    def _finish(self, call: QueuedCall, cpu_seconds: float) -> None:
        self._charge(call, max(cpu_seconds, self._used_seconds(call, self._clock.now())))
        del self._running[call]
        address = self._addresses[call.address]
        address.finish_call(call)
        if address.waiting_calls:
            self._fair_order.enqueue(call.address)
        self._forget_if_done(call.address)

    def _forget_if_done(self, name: str) -> None:
        address = self._addresses[name]
        if not address.waiting_calls and not address.running_calls:
            del self._addresses[name]
        if not self._addresses:
            self._fair_order.clear()

    def _used_seconds(self, call: QueuedCall, now: float) -> float:
        """The call's share of the threads' time until now, in seconds."""
        return (now - call.started_at) / self._max_threads if call.started_at is not None else 0.0

    def _charge(self, call: QueuedCall, seconds: float) -> None:
        """Charge the call's cost, `seconds` in total, to its address and owner."""
        unpaid = seconds - call.charged_seconds
        if unpaid > 0:
            call.charged_seconds = seconds
            self._fair_order.charge(call.address, unpaid)
            self._addresses[call.address].fair_order.charge(call.owner, unpaid)
