"""An HTTP/1.1 server for WSGI applications that gives a call a thread only when the whole call has arrived.

One thread accepts connections, shakes hands and reads, never waiting for anybody. A client that is silent or slow, in
the handshake, a call or the reading of an answer, so costs a socket and some memory, until its time is over or others
need the place (`Limits`). Clients that have shown a certificate keep their place.

A client that closes while its call waits for a thread is gone: the call is dropped. So is one that closes its sending
side only and would still read the answer, which HTTP/1.1 allows. No client of ours does so (Go's transport closes both
sides when a call is cancelled or takes too long), and Go's server takes it for the client's end as well.

    accept ──► HANDSHAKE ──► IDLE ──► READING ──► BUSY (a thread has it) ──► IDLE, READING, WRITING or CLOSING
               (TLS only)      └──────────────────►┘
"""

import contextlib
import errno
import logging
import os
import queue
import select
import socket
import ssl
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from http import HTTPStatus
from typing import Any, Final, NamedTuple

import prometheus_client
import structlog

from cardwise.clock import SYSTEM, Clock
from cardwise.kube.fairqueueing import FairQueueing, RecentUse
from cardwise.runtime.http import httpcalls
from cardwise.runtime.http.httpcalls import BadHttpCall, Environ, Reader, WsgiApp
from cardwise.runtime.http.threads import QueuedCall, Threads
from cardwise.runtime.http.tlsconnection import TlsConnection

_log = structlog.get_logger("cardwise.runtime.httpserver")

_ROUND_SECONDS: Final = 0.25  # at most, between two looks at what time is over
# Connections that a listening socket gives in a round at most. They are accepted in the order in which they came, of
# whatever address, so a probe waits for all that came before it. Taking one in costs a tenth of reading and refusing
# its call, which goes by turns of the addresses: so nearly all that wait are taken in at once. They are fewer than the
# places of a phase (`Limits`): those of one round drive none out that came in it.
_ACCEPTS: Final = 512
# Seconds of work in a round. Those of handshakes are few: clients that are in already come first. What is left over
# when they are used up is ready in the next round too, which begins with the address that has used least.
_READ_SECONDS: Final = 0.02
_HANDSHAKE_SECONDS: Final = 0.002
_ACCEPT_SECONDS: Final = 0.02
_LEAST_TURN: Final = 0.00005  # seconds that a turn of the reading thread counts for at least
# RFC 8446, section 5.1: type, version and length stand before the content, which has at most this many bytes.
_RECORD_HEAD: Final = 5
_RECORD_MOST: Final = 16_384
_HANDSHAKE_RECORD: Final = 22
_READ_BYTES: Final = 65_536
_READS: Final = 8  # of one connection in a round
# Seconds that a thread stays with a connection after an answer, for the next call. kube-scheduler asks for one pod
# after the other on the same connection: handing it back between them costs more than most answers.
_STAY_SECONDS: Final = 0.1
# Bytes that a connection takes without its calls: the objects of Python, and OpenSSL's with the buffers of a TlsLine.
_CONNECTION_BYTES: Final = 8_192
_TLS_BYTES: Final = 65_536
_MAX_BUSY: Final = 4000  # calls without a certificate, of all addresses together
# What accept(2) says when none waits, and of a connection that has failed already or that the machine keeps out.
_GONE: Final = frozenset({
    errno.EAGAIN, errno.ECONNABORTED, errno.EPROTO, errno.EPERM, errno.ENETDOWN, errno.ENOPROTOOPT, errno.EHOSTDOWN,
    errno.ENONET, errno.EHOSTUNREACH, errno.EOPNOTSUPP, errno.ENETUNREACH,
})  # fmt: skip
# Seconds that idle connections are kept when stopping: a call may be on its way already.
_STOP_SECONDS: Final = 2.0
_STOP_ACCEPT_SECONDS: Final = 0.5  # for those that wait when stopping: thousands take less, and more may come for ever

_DROPPED = prometheus_client.Counter(
    "cardwise_http_dropped_connections_total",
    "Connections that the server has closed or refused because their clients were too slow or too many.",
    ["reason"],
)
for _reason in ("handshake", "reading", "writing", "overload", "source", "memory"):
    _DROPPED.labels(_reason)  # there from the start: else the first of a kind would be no increase


class ConnectionPhase(Enum):
    """What a connection is waiting for; see the module."""

    HANDSHAKE = auto()
    IDLE = auto()
    READING = auto()
    BUSY = auto()
    WRITING = auto()
    CLOSING = auto()

    __hash__ = object.__hash__  # Enum's own, of its name, is Python code: a third of what an accepted connection costs


class PhaseLimits(NamedTuple):
    """The limits of a phase: how long a connection may be in it, and how many connections without a certificate. If
    one more comes, a connection of the address that has most there is closed, the one that has been there longest.
    """

    seconds: float
    max_connections: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What clients may cost. `idle`: Go's clients drop idle connections after 90 s. Were we the first to close,
    a call could meet the closing connection, and Go does not repeat a POST.

    `source`: connections of one address that have shown no certificate; more are refused. `busy`: calls of such an
    address that have come whole and are not answered yet. If one more comes, the flow (a namespace of an API server's
    calls) that has most loses its last one, and of flows that have equally many the flow whose calls have taken most
    time lately: so of N flows each may have an Nth, whatever the others send, and of more flows than places those wait
    that have used least. `body`: bytes of one call.

    `held`: bytes that connections without a certificate and their calls take. Where they take more, the address that
    holds most loses a call that no thread has: of the flow that holds most the largest. So N addresses may hold an Nth
    each whatever the others do, and an address that calls for many (an API server) loses nobody's calls for another's.
    Idle connections count for no address but together: where they hold more than any address, the one that has been
    idle for longest is closed, since no call is lost by it.
    """

    handshake: PhaseLimits = PhaseLimits(2.0, 1000)
    idle: PhaseLimits = PhaseLimits(100.0, 2000)
    reading: PhaseLimits = PhaseLimits(10.0, 1000)
    writing: PhaseLimits = PhaseLimits(10.0, 1000)
    closing: PhaseLimits = PhaseLimits(2.0, 1000)
    busy: int = 250
    source: int = 500
    body: int = 8 << 20
    held: int = 64 << 20


Route = Callable[[Environ], Threads]
Flow = tuple[Threads, str]
"""Calls of one address that take turns as one: of the same threads, and for the same `Listener.owner_of`."""


class Listener(NamedTuple):
    """A listening socket, and whose threads answer a call that came by it. `slow`: calls may wait there for long.

    `owner_of`: for whom a client calls, where one calls for many, who take turns then. Asked by the server's thread: it
    must be quick, and raise nothing.
    """

    sock: socket.socket
    route: Route
    slow: bool = False
    owner_of: Callable[[Environ], str] | None = None


class _Client:
    """What an address has here without a certificate."""

    __slots__ = ("connections", "flows", "held_bytes", "phases", "used")

    def __init__(self, clock: Clock) -> None:
        self.connections: dict[_Connection, None] = {}
        # Of each phase the connections that are in it, the one that has been there longest first.
        self.phases: dict[ConnectionPhase, OrderedDict[_Connection, None]] = {
            phase: OrderedDict() for phase in ConnectionPhase
        }
        self.flows: dict[Flow, OrderedDict[_Connection, None]] = {}  # those that are BUSY, by flow, the oldest first
        self.used: RecentUse[Flow] = RecentUse(clock)  # seconds with a thread
        self.held_bytes = 0  # bytes, without its idle connections

    def connections_by_size(self) -> "list[_Connection]":
        """Its connections that are not idle: those of the flow that holds most first, of a flow the largest first."""
        bytes_by_holder = Counter[Flow | _Connection]()
        working = [connection for connection in self.connections if connection.phase is not ConnectionPhase.IDLE]
        for connection in working:
            bytes_by_holder[connection.holder] += connection.held_bytes
        return sorted(
            working, key=lambda connection: (bytes_by_holder[connection.holder], connection.held_bytes), reverse=True
        )


class _Connection:
    """Belongs to the server's thread, and while it is BUSY to the thread that answers."""

    __slots__ = (
        "arrived", "client", "deadline", "flow", "held_bytes", "last", "listener", "phase", "poller", "queue",
        "readable", "reader", "seconds", "sock", "source", "threads", "tls", "unsent", "wanted", "work",
    )  # fmt: skip

    def __init__(self, sock: socket.socket, source: str, client: _Client, listener: Listener, reader: Reader) -> None:
        self.sock = sock
        self.source = source
        self.client: _Client | None = client  # None: it has shown a certificate
        self.listener = listener
        self.reader = reader
        self.threads: Threads | None = None  # that answer its call
        self.work: QueuedCall | None = None  # its call, for them
        self.flow: Flow | None = None  # of its call, while it is BUSY
        self.arrived = 0.0  # when the call that is read or answered began to come
        self.seconds = 0.0  # that threads have worked on its calls since it became BUSY
        self.last = False  # the connection ends with what is unsent
        self.unsent = memoryview(b"")
        self.held_bytes = 0  # bytes, as far as they are counted
        self.phase = ConnectionPhase.IDLE
        self.deadline = 0.0
        self.queue: OrderedDict[_Connection, None] | None = None
        self.poller: select.epoll | None = None
        self.readable: select.poll | None = None  # of the thread that stays with it
        self.wanted = _RECORD_HEAD  # bytes for which the kernel wakes us before there is TLS
        self.tls: TlsConnection | None = None

    @property
    def size(self) -> int:
        """Bytes of memory that it takes, an estimate. Not while a thread answers it."""
        own = _CONNECTION_BYTES if self.tls is None else _CONNECTION_BYTES + _TLS_BYTES
        return own + self.reader.held_bytes + len(self.unsent)

    @property
    def holder(self) -> "Flow | _Connection":
        """For which the memory of its call is counted. A call that has not come whole belongs to no flow yet."""
        return self.flow if self.phase is ConnectionPhase.BUSY and self.flow is not None else self

    def receive(self) -> bool:
        """Reads what has come, at most until a call is whole. False: the client is gone. Raises BadCall."""
        for _ in range(_READS):
            try:
                data = self.sock.recv(_READ_BYTES) if self.tls is None else self.tls.recv()
            except (BlockingIOError, ssl.SSLWantReadError):
                break
            except OSError:
                return False
            if not data:
                return False
            self.reader.feed(data)
            if self.reader.calls:
                break
        return True

    def send_continue(self) -> bool:
        """Tells a client that waits for it to send its body. False: the client is gone, or has read nothing."""
        if not self.reader.awaits_continue:
            return True
        self.reader.awaits_continue = False
        try:
            return (self.tls or self.sock).send(memoryview(httpcalls.CONTINUE)) == len(httpcalls.CONTINUE)
        except OSError:
            return False

    def send(self) -> bool:
        """Sends what the client takes now. False: the client is gone."""
        try:
            line = self.tls or self.sock
            while self.unsent:
                self.unsent = self.unsent[line.send(self.unsent) :]
        except (BlockingIOError, ssl.SSLWantWriteError):
            pass
        except OSError:
            return False
        return True


class HttpServer:
    """Serves `app` on the listeners from `run` until some time after `stop`.

    `context`: asked for each connection; without it no TLS. `stopping`: called when `run` begins to stop, while calls
    are still answered; returns at once.
    """

    def __init__(
        self,
        app: WsgiApp,
        listeners: Sequence[Listener],
        *,
        context: Callable[[], ssl.SSLContext] | None = None,
        limits: Limits,
        stopping: Callable[[], None] = lambda: None,
        clock: Clock = SYSTEM,
    ) -> None:
        self._app = app
        self._listeners = {listener.sock.fileno(): listener for listener in listeners}
        self._context = context
        self._limits = limits
        self._stopping = stopping
        self._clock = clock
        self._alive = True
        self._ended = False
        # Held while the end is checked and a descriptor used. Reentrant: a signal handler calls `stop`.
        self._end_lock = threading.RLock()
        self._bounds = {
            ConnectionPhase.HANDSHAKE: limits.handshake,
            ConnectionPhase.IDLE: limits.idle,
            ConnectionPhase.READING: limits.reading,
            ConnectionPhase.BUSY: PhaseLimits(float("inf"), _MAX_BUSY),
            ConnectionPhase.WRITING: limits.writing,
            ConnectionPhase.CLOSING: limits.closing,
        }
        # In each the next to be over is first, since all of a phase have the same time.
        self._queues: dict[tuple[ConnectionPhase, bool], OrderedDict[_Connection, None]] = {
            (phase, authenticated): OrderedDict() for phase in ConnectionPhase for authenticated in (False, True)
        }
        self._connections: dict[int, _Connection] = {}
        self._clients: dict[str, _Client] = {}  # by address
        self._used: RecentUse[str] = RecentUse(clock)  # seconds with a thread, by address
        self._held_bytes = self._idle_held = 0  # bytes, by all of them, and by those that are idle
        self._reads = FairQueueing(least=_LEAST_TURN)
        self._handshake_turns = FairQueueing(least=_LEAST_TURN)
        self._poller = select.epoll()
        # Handshakes are polled apart, so that many of them keep nobody waiting who is in already.
        self._handshakes = select.epoll()
        self._poller.register(self._handshakes, select.EPOLLIN)
        self._handed_back: queue.SimpleQueue[_Connection] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller.register(self._wake, select.EPOLLIN)
        for number, listener in self._listeners.items():
            listener.sock.setblocking(False)
            self._poller.register(number, select.EPOLLIN)

    def stop(self) -> None:
        """From any thread or signal handler; returns at once. Calls under way are answered."""
        self._alive = False
        with self._end_lock:
            if not self._ended:
                os.eventfd_write(self._wake, 1)

    def run(self, tick: Callable[[], None] = lambda: None, graceful_seconds: float = 5.0) -> None:
        """Serves until `stop`, then for `graceful_seconds` at most. `tick` is called several times a second."""
        while self._alive:
            tick()
            self._poll_once()
        until = self._clock.now() + graceful_seconds
        self._stop_listening()
        while self._connections and self._clock.now() < until:
            tick()
            self._poll_once()
        self._close_all()

    def _close_all(self) -> None:
        """Close all descriptors, except connections whose call a thread still answers: it closes them."""
        with self._end_lock:
            self._ended = True
            os.close(self._wake)  # under the lock: the number may be another file's afterwards
        with contextlib.suppress(queue.Empty):
            while True:
                self._close(self._handed_back.get_nowait())
        for connection in list(self._connections.values()):
            if connection.phase is not ConnectionPhase.BUSY:
                self._close(connection)
        self._handshakes.close()
        self._poller.close()

    # The server's thread.

    def _poll_once(self) -> None:
        ready, listeners, handshakes = list[_Connection](), list[Listener](), False
        for number, _ in self._poller.poll(_ROUND_SECONDS):
            if (connection := self._connections.get(number)) is not None:
                ready.append(connection)
            elif number == self._wake:
                self._collect_answered()
            elif number in self._listeners:
                listeners.append(self._listeners[number])
            else:
                handshakes = True
        self._run_fairly(self._reads, ready, self._handle_ready, _READ_SECONDS)
        # Only now: the number of a connection that was closed above may be given to a new one.
        for listener in listeners:
            self._accept(listener)
        if handshakes:
            self._run_handshakes()
        self._close_expired()

    def _run_fairly(
        self, turns: FairQueueing, ready: list[_Connection], step: Callable[[_Connection], None], seconds: float
    ) -> None:
        """Takes the step for the connections, for so many seconds: each address gets the same time."""
        waiting: dict[str, deque[_Connection]] = {}
        for connection in ready:
            waiting.setdefault(connection.source, deque()).append(connection)
            turns.enqueue(connection.source)
        now = self._clock.now()
        until = now + seconds
        while waiting and now < until:
            source = turns.dequeue(
                waiting.__contains__
            )  # others waited in a former round, and their connections are gone
            connection = waiting[source].popleft()
            if waiting[source]:
                turns.enqueue(source)
            else:
                del waiting[source]
            if connection.sock.fileno() >= 0:  # else it was closed for another
                self._run_step(step, connection)
            before, now = now, self._clock.now()
            turns.charge_write(source, now - before)
        if not waiting:
            turns.clear()

    def _handle_ready(self, connection: _Connection) -> None:
        """Something can be read or, where that is waited for, written."""
        if connection.phase is ConnectionPhase.WRITING:
            self._write(connection)
        elif connection.phase is ConnectionPhase.CLOSING:
            # Until the client closes too: with bytes unread, our closing would take the answer back.
            with contextlib.suppress(BlockingIOError):
                if not connection.sock.recv(_READ_BYTES):
                    self._close(connection)
        elif connection.phase is ConnectionPhase.BUSY:
            self._drop_call_of_gone_client(connection)
        else:
            self._read(connection)

    def _drop_call_of_gone_client(self, connection: _Connection) -> None:
        if self._cancel(connection):
            self._close(connection)
        elif connection.poller is not None:  # a thread answers it: nothing is left to do, and the poller would go on
            connection.poller.unregister(connection.sock)
            connection.poller = None

    def _run_step(self, step: Callable[[_Connection], None], connection: _Connection) -> None:
        try:
            step(connection)
        except Exception as error:  # noqa: BLE001 - no connection may end the loop, and with it all others
            level = logging.DEBUG if isinstance(error, OSError) else logging.ERROR
            _log.log(level, "connection failed", source=connection.source, exc_info=True)
            if connection.sock.fileno() >= 0:
                self._close(connection)

    def _read(self, connection: _Connection) -> None:
        if not connection.reader.begun:
            connection.arrived = self._clock.now()
        try:
            if not connection.receive():
                self._close(connection)
                return
        except BadHttpCall as error:
            self._refuse(connection, error.status)
            return
        if connection.reader.calls:
            self._dispatch(connection)
        elif not connection.send_continue():
            self._close(connection)
        elif connection.reader.begun and connection.phase is ConnectionPhase.IDLE:
            self._enter_phase(connection, ConnectionPhase.READING, self._poller, select.EPOLLIN)
        else:
            self._update_held_bytes(connection)
            self._free_memory()

    def _dispatch(self, connection: _Connection) -> None:
        client, listener = connection.client, connection.listener
        environ = connection.reader.calls[0].environ
        threads = listener.route(environ)
        owner = listener.owner_of(environ) if listener.owner_of is not None else ""
        flow = threads, owner
        if client is not None and not self._make_space_in_queue(connection.source, client, flow):
            self._refuse(connection, HTTPStatus.SERVICE_UNAVAILABLE)
            return
        self._leave_phase(connection)  # which may be BUSY with a former call, of another flow
        connection.threads, connection.flow = threads, flow
        self._enter_phase(connection, ConnectionPhase.BUSY, self._poller, select.EPOLLRDHUP)
        address = "" if client is None else connection.source
        connection.work = threads.submit(lambda: self._answer_calls(connection, threads), address, owner)
        self._free_memory()

    def _make_space_in_queue(self, source: str, client: _Client, flow: Flow) -> bool:
        """Whether one more call of the client's flow may wait for a thread. Where too many wait, another is given up
        for it (`RecentUse`): of another client where all have too many together, else of another flow of this one.
        """
        if len(client.phases[ConnectionPhase.BUSY]) < self._limits.busy:
            if len(self._queues[ConnectionPhase.BUSY, False]) < self._bounds[ConnectionPhase.BUSY].max_connections:
                return True
            clients = {name: known.phases[ConnectionPhase.BUSY] for name, known in self._clients.items()}
            if any(self._shed_one_call(self._clients[name]) for name in self._used.larger_owners(source, clients)):
                return True
        return any(self._shed_last_of_flow(client, other) for other in client.used.larger_owners(flow, client.flows))

    def _shed_one_call(self, client: _Client) -> bool:
        """Gives up a call of the client that has no thread yet, if there is one."""
        return any(self._shed_last_of_flow(client, flow) for flow in client.used.owners_by_size(client.flows))

    def _shed_last_of_flow(self, client: _Client, flow: Flow) -> bool:
        return any(self._shed(connection, "overload") for connection in reversed(client.flows[flow]))

    def _refuse(self, connection: _Connection, status: HTTPStatus) -> None:
        connection.unsent, connection.last = memoryview(httpcalls.refusal_response(status)), True
        self._write(connection)

    def _write(self, connection: _Connection) -> None:
        if not connection.send():
            self._close(connection)
        elif connection.unsent:
            if connection.phase is not ConnectionPhase.WRITING:
                self._enter_phase(connection, ConnectionPhase.WRITING, self._poller, select.EPOLLOUT)
        elif connection.last:
            self._close_gracefully(connection)
        elif connection.reader.calls:
            self._dispatch(connection)
        elif not connection.send_continue():
            self._close(connection)
        else:
            phase = ConnectionPhase.READING if connection.reader.begun else ConnectionPhase.IDLE
            self._enter_phase(connection, phase, self._poller, select.EPOLLIN)

    def _close_gracefully(self, connection: _Connection) -> None:
        if connection.tls is not None:
            connection.tls.unwrap()
        connection.sock.shutdown(socket.SHUT_WR)
        self._enter_phase(connection, ConnectionPhase.CLOSING, self._poller, select.EPOLLIN)

    def _collect_answered(self) -> None:
        """Connections whose calls have been answered."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        with contextlib.suppress(queue.Empty):
            while True:
                connection = self._handed_back.get_nowait()
                connection.work = None
                self._count_use(connection)
                self._run_step(self._write, connection)

    def _count_use(self, connection: _Connection) -> None:
        """Counts the time of its calls for its address and flow."""
        seconds, connection.seconds = connection.seconds, 0.0
        if connection.client is not None and connection.flow is not None:
            self._used.add_use(connection.source, seconds)
            connection.client.used.add_use(connection.flow, seconds)

    def _accept(self, listener: Listener) -> bool:
        """Whether more may be waiting."""
        until = self._clock.now() + _ACCEPT_SECONDS
        for _ in range(_ACCEPTS):
            if self._clock.now() > until:
                break
            try:
                sock, address = listener.sock.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    # Raising would end the server and with it every connection. Give the others a moment to end.
                    _log.error("failed to accept connections", error=str(error))
                    self._clock.sleep(0.05)
                elif error.errno not in _GONE:
                    raise
                return False
            self._admit(sock, address, listener)
        return True

    def _admit(self, sock: socket.socket, address: tuple[Any, ...], listener: Listener) -> None:
        source = address[0]
        client = self._clients.get(source) or _Client(self._clock)
        if len(client.connections) >= self._limits.source:
            _DROPPED.labels("source").inc()
            sock.close()
            return
        sock.setblocking(False)
        secure = self._context is not None
        try:
            environ = httpcalls.shared_environ(address, sock.getsockname(), "https" if secure else "http")
            if secure:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, _RECORD_HEAD)
        except OSError:
            sock.close()  # gone already
            return
        environ |= {httpcalls.SOCKET: sock, httpcalls.SLOW: listener.slow}
        connection = _Connection(sock, source, client, listener, Reader(environ, self._limits.body))
        self._connections[sock.fileno()] = connection
        self._clients[source] = client
        client.connections[connection] = None
        if secure:
            self._enter_phase(
                connection, ConnectionPhase.HANDSHAKE, self._handshakes, select.EPOLLIN | select.EPOLLRDHUP
            )
        else:
            self._enter_phase(connection, ConnectionPhase.IDLE, self._poller, select.EPOLLIN)

    def _run_handshakes(self) -> None:
        events = dict(self._handshakes.poll(0))

        def step(connection: _Connection) -> None:
            if connection.tls is not None:
                self._continue_handshake(connection)
            elif events[connection.sock.fileno()] & select.EPOLLRDHUP:
                self._close(connection)
            else:
                self._begin_handshake(connection)

        ready = [self._connections[number] for number in events]
        self._run_fairly(self._handshake_turns, ready, step, _HANDSHAKE_SECONDS)

    def _begin_handshake(self, connection: _Connection) -> None:
        """When the client's first record is there as a whole. Until then the kernel keeps what has come, and wakes
        nobody for less: a client that sends it slowly, or never, costs no TLS object and no look at each byte.
        """
        sock = connection.sock
        head = sock.recv(_RECORD_HEAD, socket.MSG_PEEK)
        wanted = _RECORD_HEAD
        if head[:1] == bytes([_HANDSHAKE_RECORD]):  # what is no handshake, OpenSSL refuses
            wanted += min(int.from_bytes(head[3:]), _RECORD_MOST)
        # Woken again for less than was wanted: urgent data, or no more memory. OpenSSL reads what there is.
        if wanted > connection.wanted and len(sock.recv(wanted, socket.MSG_PEEK)) < wanted:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted)
            connection.wanted = wanted
            return
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        if self._context is None:
            raise TypeError(connection.phase)
        connection.tls = TlsConnection(sock, self._context())
        self._continue_handshake(connection)

    def _continue_handshake(self, connection: _Connection) -> None:
        if connection.tls is None:
            raise TypeError(connection.phase)
        try:
            connection.tls.do_handshake()
        except ssl.SSLWantReadError:
            self._handshakes.modify(connection.sock, select.EPOLLIN)
            return
        except ssl.SSLWantWriteError:
            self._handshakes.modify(connection.sock, select.EPOLLOUT)
            return
        if connection.tls.getpeercert() is not None:
            self._leave_phase(connection)
            self._detach_from_client(connection)
        self._enter_phase(connection, ConnectionPhase.IDLE, self._poller, select.EPOLLIN)
        if connection.tls.has_pending_data and connection.sock.fileno() >= 0:
            self._read(connection)

    def _close_expired(self) -> None:
        now = self._clock.now()
        for (phase, _), waiting in self._queues.items():
            while waiting and (connection := next(iter(waiting))).deadline <= now:
                if phase in (ConnectionPhase.IDLE, ConnectionPhase.CLOSING):
                    self._close(connection)
                else:
                    self._drop(connection, phase.name.lower())

    def _stop_listening(self) -> None:
        self._stopping()
        # Who has connected already is answered; who connects from now on is refused at once, and finds another.
        accept_until = self._clock.now() + _STOP_ACCEPT_SECONDS
        for number, listener in self._listeners.items():
            while self._accept(listener) and self._clock.now() < accept_until:
                pass
            self._poller.unregister(number)
            listener.sock.close()
        self._listeners.clear()
        self._bounds[ConnectionPhase.IDLE] = PhaseLimits(_STOP_SECONDS, self._limits.idle.max_connections)
        until = self._clock.now() + _STOP_SECONDS
        for authenticated in (False, True):
            for connection in self._queues[ConnectionPhase.IDLE, authenticated]:
                connection.deadline = min(connection.deadline, until)

    def _enter_phase(
        self, connection: _Connection, phase: ConnectionPhase, poller: select.epoll | None, events: int = 0
    ) -> None:
        self._leave_phase(connection)
        client, bound = connection.client, self._bounds[phase]
        waiting = self._queues[phase, client is None]
        if client is not None:
            if len(waiting) >= bound.max_connections:
                self._drop_of_largest(phase)
            client.phases[phase][connection] = None
            if phase is ConnectionPhase.BUSY and connection.flow is not None:
                client.flows.setdefault(connection.flow, OrderedDict())[connection] = None
            self._count_bytes(connection, client, -connection.held_bytes)  # measured anew below, as of its new phase
        connection.phase, connection.queue = phase, waiting
        connection.deadline = self._clock.now() + bound.seconds
        waiting[connection] = None
        if connection.poller is not None and connection.poller is poller:
            poller.modify(connection.sock, events)
        else:
            if connection.poller is not None:
                connection.poller.unregister(connection.sock)
            if poller is not None:
                poller.register(connection.sock, events)
            connection.poller = poller
        self._update_held_bytes(connection)
        if phase is not ConnectionPhase.BUSY:  # that one can be given up once it has been submitted
            self._free_memory()

    def _leave_phase(self, connection: _Connection) -> None:
        if connection.queue is not None:
            if connection.client is not None:
                del connection.client.phases[connection.phase][connection]
                if connection.phase is ConnectionPhase.BUSY and connection.flow is not None:
                    flow = connection.client.flows[connection.flow]
                    del flow[connection]
                    if not flow:
                        del connection.client.flows[connection.flow]
            del connection.queue[connection]
            connection.queue = None

    def _drop_of_largest(self, phase: ConnectionPhase) -> None:
        """Of the addresses with the most connections in the phase, drops the one that has been in it longest."""
        largest = max(len(client.phases[phase]) for client in self._clients.values())
        for connection in self._queues[phase, False]:
            if connection.client is not None and len(connection.client.phases[phase]) == largest:
                self._drop(connection, "overload")
                return

    def _update_held_bytes(self, connection: _Connection) -> None:
        if connection.client is not None:
            self._count_bytes(connection, connection.client, connection.size - connection.held_bytes)

    def _count_bytes(self, connection: _Connection, client: _Client, added: int) -> None:
        connection.held_bytes += added
        self._held_bytes += added
        if connection.phase is ConnectionPhase.IDLE:
            self._idle_held += added
        else:
            client.held_bytes += added

    def _free_memory(self) -> None:
        """Where connections hold too much, gives up some until they do not; `Limits` says which."""
        while self._held_bytes > self._limits.held and self._shed_largest():
            pass

    def _shed_largest(self) -> bool:
        idle = self._queues[ConnectionPhase.IDLE, False]
        for client in sorted(self._clients.values(), key=lambda client: client.held_bytes, reverse=True):
            if idle and self._idle_held >= client.held_bytes:
                break
            if any(self._shed(connection, "memory") for connection in client.connections_by_size()):
                return True
        return bool(idle) and self._shed(next(iter(idle)), "memory")

    def _shed(self, connection: _Connection, reason: str) -> bool:
        """Closes the connection, unless a thread answers it; if its call waits for one, with 503."""
        if connection.phase is ConnectionPhase.BUSY:
            if not self._cancel(connection):
                return False
            connection.unsent = memoryview(httpcalls.refusal_response(HTTPStatus.SERVICE_UNAVAILABLE))
            connection.send()
        self._drop(connection, reason)
        return True

    def _cancel(self, connection: _Connection) -> bool:
        """Takes its call from the queue of its threads. False: a thread has it, or has had it."""
        if connection.threads is None or connection.work is None:
            return False
        return connection.threads.cancel(connection.work)

    def _drop(self, connection: _Connection, reason: str) -> None:
        _DROPPED.labels(reason).inc()
        self._close(connection)

    def _close(self, connection: _Connection) -> None:
        self._leave_phase(connection)
        self._detach_from_client(connection)
        del self._connections[connection.sock.fileno()]
        connection.reader.close()
        connection.work = None  # which knows the connection
        connection.sock.close()  # which takes it from its poller

    def _detach_from_client(self, connection: _Connection) -> None:
        """It is none of its address any more: it has shown a certificate, or ends."""
        client = connection.client
        if client is None:
            return
        self._count_bytes(connection, client, -connection.held_bytes)
        del client.connections[connection]
        if not client.connections:
            del self._clients[connection.source]
        connection.client = None

    # The threads that answer.

    def _answer_calls(self, connection: _Connection, threads: Threads) -> None:
        """The call, and those that follow on the connection while this thread may stay with it."""
        try:
            while True:
                self._answer_next(connection)
                if connection.last or connection.unsent or not self._next_call(connection, threads):
                    break
        except BaseException:
            connection.unsent, connection.last = memoryview(b""), True  # else its client would wait, and keep its place
            raise
        finally:
            self._hand_back(connection)

    def _hand_back(self, connection: _Connection) -> None:
        """Give the connection back to the server's thread; close it if that has ended."""
        with self._end_lock:
            if self._ended:
                connection.sock.close()
                return
            self._handed_back.put(connection)
            os.eventfd_write(self._wake, 1)

    def _answer_next(self, connection: _Connection) -> None:
        call = connection.reader.calls.popleft()
        call.environ[httpcalls.ARRIVED] = connection.arrived
        began = self._clock.now()
        try:
            answer, connection.last = httpcalls.answer_call(self._app, call, lambda: not self._alive)
        except Exception:  # noqa: BLE001 - the outermost frame of a call; logged, and answered
            _log.exception("failed to answer a call", path=call.environ["PATH_INFO"])
            answer, connection.last = httpcalls.refusal_response(HTTPStatus.INTERNAL_SERVER_ERROR), True
        connection.seconds += self._clock.now() - began
        connection.unsent = memoryview(answer)
        if not connection.send():
            connection.unsent, connection.last = memoryview(b""), True

    def _next_call(self, connection: _Connection, threads: Threads) -> bool:
        """Whether another call came on the connection while this thread could stay with it."""
        if connection.reader.calls:
            return connection.client is None and connection.listener.owner_of is None  # others take turns
        if connection.listener.owner_of is not None and threads.is_busy:
            return False
        if not self._alive or not threads.staying.acquire(blocking=False):
            return False
        try:
            return self._await_next_call(connection)
        finally:
            threads.staying.release()

    def _await_next_call(self, connection: _Connection) -> bool:
        if connection.readable is None:
            connection.readable = select.poll()
            connection.readable.register(connection.sock, select.POLLIN)
        until = self._clock.now() + _STAY_SECONDS
        while (remaining := until - self._clock.now()) > 0 and connection.readable.poll(remaining * 1000):
            if not connection.reader.begun:
                connection.arrived = self._clock.now()
            try:
                connection.last = not connection.receive()
                if not connection.last and not connection.reader.calls:
                    connection.last = not connection.send_continue()
            except BadHttpCall as error:
                connection.unsent, connection.last = memoryview(httpcalls.refusal_response(error.status)), True
            if connection.last or connection.reader.calls:
                return not connection.last
        return False
