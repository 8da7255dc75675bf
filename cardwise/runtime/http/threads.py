"""Threads that answer calls, and whose call is next: each client address gets the same time of them.

The unit is time and not calls, since a call may cost a hundred times what another does. With four threads, an address
A whose calls take 400 ms each and an address B whose calls take 4 ms each, B has a hundred calls answered for each of
A's. A call costs its seconds of CPU, or its seconds with a thread divided by the number of threads, whichever is more:
these are the two things that calls have in common.

Of N + 1 addresses that always have calls waiting each gets 1/(N + 1) of the time, however many connections, calls or
namespaces it has. An API server, which calls for a whole cluster, has no greater weight: without a certificate it looks
like everybody else, and what it says about namespaces anybody could say. But an address that uses less than its part
waits for no queue: its call is begun as soon as any thread is free. So the API server of a cluster that is attacked
from N addresses creates pods with the usual delay until they take 1/(N + 1) of the CPU. With a certificate
(`webhook.clientCA`) no other address has a call at all.
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import Final

from cardwise.clock import SYSTEM, Clock
from cardwise.kube.fairqueueing import FairQueueing
from cardwise.supervision import supervised_thread

_STAYING: Final = 16  # threads of a set that may stay with a connection; two are always left for whoever else comes
_LEAST: Final = 0.0005  # seconds that a call counts for at least


class QueuedCall:
    """A call that waits for a thread, has one or is done."""

    __slots__ = ("address", "charged", "owner", "run", "since")

    def __init__(self, run: Callable[[], None], address: str, owner: str) -> None:
        self.run = run
        self.address = address
        self.owner = owner
        self.since: float | None = None  # when it got a thread
        self.charged = _LEAST  # seconds that its address has been charged


class _Address:
    """The calls of one address. Those for whom it calls (namespaces) take turns by time as well."""

    def __init__(self) -> None:
        self.turns = FairQueueing(least=_LEAST)
        self.waiting: dict[str, deque[QueuedCall]] = {}
        self.running = 0

    def add_call(self, work: QueuedCall) -> None:
        self.waiting.setdefault(work.owner, deque()).append(work)
        self.turns.enqueue(work.owner)

    def remove_call(self, work: QueuedCall) -> bool:
        """Whether it was waiting."""
        queue = self.waiting.get(work.owner, ())
        if work not in queue:
            return False
        self.waiting[work.owner].remove(work)
        if not queue:
            del self.waiting[work.owner]
        return True

    def dequeue_call(self) -> QueuedCall:
        """Chooses the next call, which waits no more; there must be one."""
        owner = self.turns.dequeue(self.waiting.__contains__)  # the calls of others have been cancelled
        queue = self.waiting[owner]
        work = queue.popleft()
        if queue:
            self.turns.enqueue(owner)
        else:
            del self.waiting[owner]
        return work


class Threads:
    """Threads that answer calls, started as they are needed. Daemons: one that hangs keeps no process from its end.

    Where more is to be done than there are threads, client addresses take turns by time, and within an address those
    for whom it calls.
    """

    def __init__(self, name: str, max_threads: int, clock: Clock = SYSTEM) -> None:
        self.staying = threading.Semaphore(max(0, min(_STAYING, max_threads - 2)))
        self._name = name
        self._clock = clock
        self._max_threads = self._startable = max_threads
        self._free = 0
        self._turns = FairQueueing(least=_LEAST)
        self._addresses: dict[str, _Address] = {}
        self._running: dict[QueuedCall, None] = {}
        self._waiting = 0
        self._some = threading.Condition()

    @property
    def is_busy(self) -> bool:
        """Whether what is submitted now will wait."""
        return not self._startable and self._waiting >= self._free

    def submit(self, run: Callable[[], None], address: str = "", owner: str = "") -> QueuedCall:
        """Queues a call of the address for the next free thread; `owner`: for whom the address calls."""
        work = QueuedCall(run, address, owner)
        with self._some:
            self._addresses.setdefault(address, _Address()).add_call(work)
            self._turns.enqueue(address)
            self._waiting += 1
            if self._waiting <= self._free or not self._startable:
                self._some.notify()
                return work
            self._startable -= 1
        supervised_thread(self._run, f"{self._name}_{self._startable}", self._clock).start()
        return work

    def cancel(self, work: QueuedCall) -> bool:
        """Takes a call from the queue. False: a thread has it, or has had it."""
        with self._some:
            address = self._addresses.get(work.address)
            if address is None or not address.remove_call(work):
                return False
            self._waiting -= 1
            self._forget_if_done(work.address)
            return True

    def _run(self) -> None:
        while True:
            with self._some:
                self._free += 1
                self._clock.wait_for(self._some, lambda: self._waiting > 0, None)
                self._free -= 1
                work = self._begin_next()
            before = self._clock.cpu()
            try:
                work.run()
            finally:
                with self._some:
                    self._finish(work, self._clock.cpu() - before)
                del work  # it knows its connection, and the next may be long in coming

    def _begin_next(self) -> QueuedCall:
        now = self._clock.now()
        for running in self._running:  # else an address would get all threads before its first call is over
            self._charge(running, self._used_seconds(running, now))
        name = self._turns.dequeue(self._has_waiting)  # the calls of others have been cancelled
        address = self._addresses[name]
        work = address.dequeue_call()
        work.since = now
        address.running += 1
        self._running[work] = None
        self._waiting -= 1
        if address.waiting:
            self._turns.enqueue(name)
        return work

    def _has_waiting(self, name: str) -> bool:
        address = self._addresses.get(name)
        return address is not None and bool(address.waiting)

    def _finish(self, work: QueuedCall, cpu_seconds: float) -> None:
        self._charge(work, max(cpu_seconds, self._used_seconds(work, self._clock.now())))
        del self._running[work]
        self._addresses[work.address].running -= 1
        self._forget_if_done(work.address)

    def _forget_if_done(self, name: str) -> None:
        address = self._addresses[name]
        if not address.waiting and not address.running:
            del self._addresses[name]
        if not self._addresses:
            self._turns.clear()

    def _used_seconds(self, work: QueuedCall, now: float) -> float:
        """Its part of the threads' time until now."""
        return (now - work.since) / self._max_threads if work.since is not None else 0.0

    def _charge(self, work: QueuedCall, seconds: float) -> None:
        """Charges what the call has cost, so many seconds in all, to its address and to whom it is for."""
        unpaid = seconds - work.charged
        if unpaid > 0:
            work.charged = seconds
            self._turns.charge(work.address, unpaid)
            self._addresses[work.address].turns.charge(work.owner, unpaid)
