"""An HTTP/1.1 server for WSGI applications that assigns a thread to a call only when the call is complete.

One thread accepts connections, performs TLS handshakes and reads, without ever waiting for a client. A client may be
silent or slow in the handshake, in a call or in reading a response. It then costs only a socket and some memory, until
the time limit or until other clients need the slot (`Limits`). Clients with a certificate keep their slot. All limits
of an address count an IPv6 client by its /64 network (`client_network`).

If a client closes the connection while a call waits for a thread, the call is dropped. The call is also dropped if the
client only closes its sending side. HTTP/1.1 allows this, but Cardwise's clients never do it: Go's transport closes
both sides when a call is cancelled or times out. Go's server also treats it as the end of the connection.

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
from cardwise.runtime.http.threads import CallThreads, QueuedCall
from cardwise.runtime.http.tlsconnection import TlsConnection

_log = structlog.get_logger("cardwise.runtime.httpserver")

_MAX_ROUND_SECONDS: Final = 0.25  # maximum seconds between two checks of expired connections
# Maximum number of connections that are accepted in a round. The kernel delivers connections of all addresses in the
# order of their arrival, so a probe waits until all earlier connections are accepted. Therefore nearly all waiting
# connections are accepted at once: this takes a tenth of the time of reading and refusing their calls, which is done
# fairly by address. The number is lower than the limit of a phase (`Limits`), so connections of one round do not
# displace each other.
_MAX_ACCEPTS: Final = 512
# Maximum seconds of reading and of handshakes in a round. Handshakes get little time, because connected clients come
# first. The next round handles the remaining connections, and begins with the address that has used the least time.
_READ_SECONDS: Final = 0.02
_HANDSHAKE_SECONDS: Final = 0.002
_ACCEPT_SECONDS: Final = 0.02
_MIN_CHARGE: Final = 0.00005  # the minimum seconds that are charged for a step of the reading thread
# RFC 8446, section 5.1: a TLS record has a head with type, version and length, and content of limited length, in bytes.
_TLS_RECORD_HEAD_BYTES: Final = 5
_MAX_RECORD: Final = 16_384
_TLS_HANDSHAKE_RECORD_TYPE: Final = 22
_READ_BYTES: Final = 65_536
_MAX_READS: Final = 8  # maximum number of reads of one connection in a round
# Seconds that a thread stays with a connection after a response, for the next call. kube-scheduler sends the calls for
# a pod one after the other on the same connection, and returning the connection in between takes longer than most
# calls.
_STAY_SECONDS: Final = 0.1
# Estimated bytes of memory of a connection without its calls: the objects of Python, and of OpenSSL with its buffers.
_CONNECTION_BYTES: Final = 8_192
_TLS_BYTES: Final = 65_536
_MAX_BUSY: Final = 4000  # maximum number of waiting and running calls of all addresses without a certificate together
# Errors of accept(2) that are ignored: no connection waits, or the connection has failed or is blocked by a firewall.
_NO_CONNECTION_ERRORS: Final = frozenset({
    errno.EAGAIN, errno.ECONNABORTED, errno.EPROTO, errno.EPERM, errno.ENETDOWN, errno.ENOPROTOOPT, errno.EHOSTDOWN,
    errno.ENONET, errno.EHOSTUNREACH, errno.EOPNOTSUPP, errno.ENETUNREACH,
})  # fmt: skip
# Seconds for which idle connections are kept after `stop`: the client may have sent a call already.
_IDLE_SECONDS_AFTER_STOP: Final = 2.0
_STOP_ACCEPT_SECONDS: Final = 0.5  # maximum seconds for accepting the connections that wait at `stop`

_DROPPED_CONNECTIONS = prometheus_client.Counter(
    "cardwise_http_dropped_connections_total",
    "Connections that were closed or refused because their clients were too slow or too many, by reason: handshake, "
    "reading, writing, overload, source, memory.",
    ["reason"],
)
for _reason in ("handshake", "reading", "writing", "overload", "source", "memory"):
    _DROPPED_CONNECTIONS.labels(_reason)  # create each label now: otherwise its first increase would not be visible


class ConnectionPhase(Enum):
    """The phase of a connection; see the module."""

    HANDSHAKE = auto()
    IDLE = auto()
    READING = auto()
    BUSY = auto()
    WRITING = auto()
    CLOSING = auto()

    __hash__ = object.__hash__  # Enum's own is Python code, and takes a third of the time of accepting a connection


class PhaseLimits(NamedTuple):
    """The limits of a phase.

    seconds: maximum seconds of a connection in the phase.
    max_connections: maximum number of connections without a certificate. If there are more, the address with the most
        connections in the phase loses its oldest connection in the phase.
    """

    seconds: float
    max_connections: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits for clients.

    handshake, idle, reading, writing, closing: the limits of the phases. Go's clients close idle connections after 90
        s, so `idle` is longer. If the server closed first, a call could meet the closing connection, and Go does not
        repeat a POST.
    busy: maximum number of waiting and running calls of an address without a certificate. A flow is an owner of calls:
        a namespace in the calls of an API server. If there are more calls, the flow with the most calls loses its last
        call. Of several such flows, the one that has recently used the most time loses it. So each of N flows may have
        an Nth of the calls, regardless of the other flows. If there are more flows than slots, the flows that have used
        the least time may wait.
    source: maximum number of connections of one address without a certificate; further connections are refused.
    body: maximum number of bytes of the body of a call.
    held: maximum number of bytes of memory of all connections without a certificate and their calls. Above this, the
        address with the most memory loses a waiting call: the largest call of its largest flow. So each of N addresses
        may use an Nth of the memory, whatever the other addresses use. For the same reason, an owner behind an API
        server cannot displace the calls of another owner. Idle connections count together. If they use more memory than
        any address, the connection with the longest idle time is closed, since this loses no call.
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


Route = Callable[[Environ], CallThreads]
Flow = tuple[CallThreads, str]
"""The calls of one address for the same threads and the same owner (`Listener.call_owner`)."""


class Listener(NamedTuple):
    """A listening socket.

    route: returns the threads that answer a call, by the call's environ.
    slow: whether calls may wait for minutes on these threads.
    long: whether the application may move calls that take long (`httpcalls.move_long_call`); `route` then returns the
        threads for such calls.
    call_owner: returns the owner of a call (such as a namespace), by the call's environ. The owners of a client's calls
        share the client's time fairly. Called by several threads; must return at once and never raise.
    """

    sock: socket.socket
    route: Route
    slow: bool = False
    long: bool = False
    call_owner: Callable[[Environ], str] | None = None


class _Client:
    """The connections of an address without a certificate."""

    __slots__ = ("connections", "flows", "held_bytes", "phases", "used")

    def __init__(self, clock: Clock) -> None:
        self.connections: dict[_Connection, None] = {}
        # The connections by phase, the connection that has been in the phase for longest first.
        self.phases: dict[ConnectionPhase, OrderedDict[_Connection, None]] = {
            phase: OrderedDict() for phase in ConnectionPhase
        }
        self.flows: dict[Flow, OrderedDict[_Connection, None]] = {}  # the BUSY connections by flow, the oldest first
        self.used: RecentUse[Flow] = RecentUse(clock)  # by flow, the seconds on threads
        self.held_bytes = 0  # the bytes of memory of its connections that are not idle

    def connections_by_size(self) -> "list[_Connection]":
        """The client's active connections: the largest flow first, and within a flow the largest connection first."""
        bytes_by_holder = Counter[Flow | _Connection]()
        working = [connection for connection in self.connections if connection.phase is not ConnectionPhase.IDLE]
        for connection in working:
            bytes_by_holder[connection.holder] += connection.held_bytes
        return sorted(
            working, key=lambda connection: (bytes_by_holder[connection.holder], connection.held_bytes), reverse=True
        )


class _Connection:
    """A connection. Used only by the server's thread; while the connection is BUSY, only by the answering thread."""

    __slots__ = (
        "arrived", "client", "close_after", "deadline", "flow", "held_bytes", "listener", "phase", "poller", "queue",
        "queued_call", "readable", "reader", "seconds", "sock", "source", "threads", "tls", "unsent", "wanted_bytes",
    )  # fmt: skip

    def __init__(self, sock: socket.socket, source: str, client: _Client, listener: Listener, reader: Reader) -> None:
        self.sock = sock
        self.source = source
        self.client: _Client | None = client  # None: the client has a certificate
        self.listener = listener
        self.reader = reader
        self.threads: CallThreads | None = None  # the threads that answer its call
        self.queued_call: QueuedCall | None = None  # its call in the queue of `threads`
        self.flow: Flow | None = None  # the flow of its call, while it is BUSY
        self.arrived = 0.0  # the time when the present call began to arrive
        self.seconds = 0.0  # the time that threads have spent on its calls since it became BUSY
        self.close_after = False  # whether the connection ends after `unsent`
        self.unsent = memoryview(b"")
        self.held_bytes = 0  # the connection's bytes of memory, as last counted
        self.phase = ConnectionPhase.IDLE
        self.deadline = 0.0
        self.queue: OrderedDict[_Connection, None] | None = None
        self.poller: select.epoll | None = None
        self.readable: select.poll | None = None  # used by a thread that stays with the connection
        self.wanted_bytes = (
            _TLS_RECORD_HEAD_BYTES  # before TLS begins: the bytes after which the kernel reports the socket as readable
        )
        self.tls: TlsConnection | None = None

    @property
    def size(self) -> int:
        """The estimated bytes of memory of the connection. Not valid while a thread answers a call."""
        base_bytes = _CONNECTION_BYTES if self.tls is None else _CONNECTION_BYTES + _TLS_BYTES
        return base_bytes + self.reader.held_bytes + len(self.unsent)

    @property
    def holder(self) -> "Flow | _Connection":
        """The flow to which the connection's memory counts; the connection itself while its call is incomplete."""
        return self.flow if self.phase is ConnectionPhase.BUSY and self.flow is not None else self

    @property
    def limited_address(self) -> str:
        """The address whose threads are limited; "" for a client with a certificate."""
        return "" if self.client is None else self.source

    @property
    def next_flow(self) -> Flow:
        """The flow of the complete call. Raises TypeError if the call is incomplete."""
        if self.reader.call is None:
            raise TypeError(self.phase)
        environ = self.reader.call.environ
        owner = environ.get(httpcalls.LONG_OWNER_KEY)
        if owner is None:
            owner = self.listener.call_owner(environ) if self.listener.call_owner is not None else ""
        return self.listener.route(environ), owner

    def receive(self) -> bool:
        """Read received bytes until a call is complete or no bytes are left. Returns False if the client has closed the
        connection. Raises BadHttpCall.
        """
        for _ in range(_MAX_READS):
            try:
                data = self.sock.recv(_READ_BYTES) if self.tls is None else self.tls.recv()
            except (BlockingIOError, ssl.SSLWantReadError):
                break
            except OSError:
                return False
            if not data:
                return False
            self.reader.feed(data)
            if self.reader.call is not None:
                break
        return True

    def send_continue(self) -> bool:
        """Send CONTINUE if the client waits for it. Returns False if the client has closed the connection or does not
        read.
        """
        if not self.reader.awaits_continue:
            return True
        self.reader.awaits_continue = False
        try:
            return (self.tls or self.sock).send(memoryview(httpcalls.CONTINUE_RESPONSE)) == len(
                httpcalls.CONTINUE_RESPONSE
            )
        except OSError:
            return False

    def flush(self) -> bool:
        """Send as much as the client accepts now. Returns False if the client has closed the connection."""
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

    context: returns the TLS context for a new connection; None: no TLS.
    stopping: called when `run` begins to stop, while calls are still answered; returns at once.
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
        # Held while `_ended` is checked and a descriptor is used. Reentrant, because signal handlers call `stop`.
        self._end_lock = threading.RLock()
        self._bounds = {
            ConnectionPhase.HANDSHAKE: limits.handshake,
            ConnectionPhase.IDLE: limits.idle,
            ConnectionPhase.READING: limits.reading,
            ConnectionPhase.BUSY: PhaseLimits(float("inf"), _MAX_BUSY),
            ConnectionPhase.WRITING: limits.writing,
            ConnectionPhase.CLOSING: limits.closing,
        }
        # Each queue is sorted by deadline, because all connections of a phase have the same time limit.
        self._queues: dict[tuple[ConnectionPhase, bool], OrderedDict[_Connection, None]] = {
            (phase, authenticated): OrderedDict() for phase in ConnectionPhase for authenticated in (False, True)
        }
        self._connections: dict[int, _Connection] = {}
        self._clients: dict[str, _Client] = {}  # by address
        self._used: RecentUse[str] = RecentUse(clock)  # the seconds that threads spent on the calls of each address
        self._held_bytes = self._idle_held = 0  # the bytes of memory of all connections, and of the idle ones
        self._read_order = FairQueueing(min_charge=_MIN_CHARGE)
        self._handshake_order = FairQueueing(min_charge=_MIN_CHARGE)
        self._poller = select.epoll()
        # Handshakes are polled separately, so that many of them do not delay connected clients.
        self._handshakes = select.epoll()
        self._poller.register(self._handshakes, select.EPOLLIN)
        self._returned: queue.SimpleQueue[_Connection] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller.register(self._wake, select.EPOLLIN)
        for number, listener in self._listeners.items():
            listener.sock.setblocking(False)
            self._poller.register(number, select.EPOLLIN)

    def stop(self) -> None:
        """Begin to stop; running calls are still answered. Returns at once. Any thread and signal handlers may call
        it.
        """
        self._alive = False
        with self._end_lock:
            if not self._ended:
                os.eventfd_write(self._wake, 1)

    def run(self, tick: Callable[[], None] = lambda: None, graceful_seconds: float = 5.0) -> None:
        """Serve until `stop`, then for up to `graceful_seconds`. `tick` is called several times a second."""
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
        """Close all descriptors, except of connections whose call a thread still answers: this thread closes them."""
        with self._end_lock:
            self._ended = True
            os.close(self._wake)  # under the lock, because another file may get the number afterwards
        with contextlib.suppress(queue.Empty):
            while True:
                self._close(self._returned.get_nowait())
        for connection in list(self._connections.values()):
            if connection.phase is not ConnectionPhase.BUSY:
                self._close(connection)
        self._handshakes.close()
        self._poller.close()

    # The server's thread.

    def _poll_once(self) -> None:
        ready, listeners, handshakes = list[_Connection](), list[Listener](), False
        for number, _ in self._poller.poll(_MAX_ROUND_SECONDS):
            if (connection := self._connections.get(number)) is not None:
                ready.append(connection)
            elif number == self._wake:
                self._collect_answered()
            elif number in self._listeners:
                listeners.append(self._listeners[number])
            else:
                handshakes = True
        self._run_fairly(self._read_order, ready, self._handle_ready, _READ_SECONDS)
        # Accept only now, because a new connection may get the descriptor of one that was closed above.
        for listener in listeners:
            self._accept_waiting(listener)
        if handshakes:
            self._run_handshakes()
        self._close_expired()

    def _run_fairly(
        self, fair_order: FairQueueing, ready: list[_Connection], step: Callable[[_Connection], None], seconds: float
    ) -> None:
        """Run `step` for the ready connections for up to `seconds`: each address gets the same time."""
        waiting: dict[str, deque[_Connection]] = {}
        for connection in ready:
            waiting.setdefault(connection.source, deque()).append(connection)
            fair_order.enqueue(connection.source)
        now = self._clock.now()
        until = now + seconds
        while waiting and now < until:
            source = fair_order.dequeue(
                waiting.__contains__
            )  # addresses of a former round may no longer have ready connections
            connection = waiting[source].popleft()
            if waiting[source]:
                fair_order.enqueue(source)
            else:
                del waiting[source]
            if connection.sock.fileno() >= 0:  # otherwise it was closed to make space for another connection
                self._run_step(step, connection)
            before, now = now, self._clock.now()
            fair_order.charge_write(source, now - before)
        if not waiting:
            fair_order.clear()

    def _handle_ready(self, connection: _Connection) -> None:
        """Handle a connection that is ready for reading or, if it is WRITING, for writing."""
        if connection.phase is ConnectionPhase.WRITING:
            self._write(connection)
        elif connection.phase is ConnectionPhase.CLOSING:
            # Wait until the client closes too: if the server closed with unread bytes, the client could lose the
            # response.
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
        elif (
            connection.poller is not None
        ):  # a thread answers the call: stop polling, else the poller would report the connection again
            connection.poller.unregister(connection.sock)
            connection.poller = None

    def _run_step(self, step: Callable[[_Connection], None], connection: _Connection) -> None:
        try:
            step(connection)
        except Exception as error:  # noqa: BLE001 - an error of one connection must not end the loop for all
            level = logging.DEBUG if isinstance(error, OSError) else logging.ERROR
            _log.log(level, "connection failed", source=connection.source, exc_info=True)
            if connection.sock.fileno() >= 0:
                self._close(connection)

    def _read(self, connection: _Connection) -> None:
        if not connection.reader.has_begun:
            connection.arrived = self._clock.now()
        try:
            if not connection.receive():
                self._close(connection)
                return
        except BadHttpCall as error:
            self._refuse(connection, error.status)
            return
        if connection.reader.call is not None:
            self._dispatch(connection)
        elif not connection.send_continue():
            self._close(connection)
        elif connection.reader.has_begun and connection.phase is ConnectionPhase.IDLE:
            self._enter_phase(connection, ConnectionPhase.READING, self._poller, select.EPOLLIN)
        else:
            self._update_held_bytes(connection)
            self._drop_connections_over_memory_limit()

    def _dispatch(self, connection: _Connection) -> None:
        client, flow = connection.client, connection.next_flow
        threads, owner = flow
        if client is not None and not self._make_space_in_queue(connection.source, client, flow):
            self._refuse(connection, HTTPStatus.SERVICE_UNAVAILABLE)
            return
        self._leave_phase(connection)  # the connection may be BUSY with a former call of another flow
        connection.threads, connection.flow = threads, flow
        self._enter_phase(connection, ConnectionPhase.BUSY, self._poller, select.EPOLLRDHUP)
        connection.queued_call = threads.submit(
            lambda: self._answer_calls(connection, flow), connection.limited_address, owner
        )
        self._drop_connections_over_memory_limit()

    def _make_space_in_queue(self, source: str, client: _Client, flow: Flow) -> bool:
        """Whether one more call of the client's flow may wait for a thread. If there are too many calls, another
        waiting call is refused instead (`RecentUse`): a call of another client if the total is too large, else a call
        of another flow of this client.
        """
        if len(client.phases[ConnectionPhase.BUSY]) < self._limits.busy:
            if len(self._queues[ConnectionPhase.BUSY, False]) < self._bounds[ConnectionPhase.BUSY].max_connections:
                return True
            clients = {name: other_client.phases[ConnectionPhase.BUSY] for name, other_client in self._clients.items()}
            if any(self._refuse_one_call(self._clients[name]) for name in self._used.larger_owners(source, clients)):
                return True
        return any(self._refuse_last_of_flow(client, other) for other in client.used.larger_owners(flow, client.flows))

    def _refuse_one_call(self, client: _Client) -> bool:
        """Refuse a waiting call of the client. Returns False if the client has no waiting call."""
        return any(self._refuse_last_of_flow(client, flow) for flow in client.used.owners_by_size(client.flows))

    def _refuse_last_of_flow(self, client: _Client, flow: Flow) -> bool:
        return any(self._refuse_or_close(connection, "overload") for connection in reversed(client.flows[flow]))

    def _refuse(self, connection: _Connection, status: HTTPStatus) -> None:
        connection.unsent, connection.close_after = memoryview(httpcalls.refusal_response(status)), True
        self._write(connection)

    def _write(self, connection: _Connection) -> None:
        if not connection.flush():
            self._close(connection)
        elif connection.unsent:
            if connection.phase is not ConnectionPhase.WRITING:
                self._enter_phase(connection, ConnectionPhase.WRITING, self._poller, select.EPOLLOUT)
        elif connection.close_after:
            self._close_gracefully(connection)
        elif connection.reader.call is not None:
            self._dispatch(connection)
        elif not connection.send_continue():
            self._close(connection)
        else:
            phase = ConnectionPhase.READING if connection.reader.has_begun else ConnectionPhase.IDLE
            self._enter_phase(connection, phase, self._poller, select.EPOLLIN)

    def _close_gracefully(self, connection: _Connection) -> None:
        if connection.tls is not None:
            connection.tls.unwrap()
        connection.sock.shutdown(socket.SHUT_WR)
        self._enter_phase(connection, ConnectionPhase.CLOSING, self._poller, select.EPOLLIN)

    def _collect_answered(self) -> None:
        """Take back the connections whose calls the threads have answered."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        with contextlib.suppress(queue.Empty):
            while True:
                connection = self._returned.get_nowait()
                connection.queued_call = None
                self._charge_call_seconds(connection)
                self._run_step(self._write, connection)

    def _charge_call_seconds(self, connection: _Connection) -> None:
        """Charge the time of the connection's calls to its address and flow."""
        seconds, connection.seconds = connection.seconds, 0.0
        if connection.client is not None and connection.flow is not None:
            self._used.add_use(connection.source, seconds)
            connection.client.used.add_use(connection.flow, seconds)

    def _accept_waiting(self, listener: Listener) -> bool:
        """Accept waiting connections. Returns whether more may be waiting."""
        until = self._clock.now() + _ACCEPT_SECONDS
        for _ in range(_MAX_ACCEPTS):
            if self._clock.now() > until:
                break
            try:
                sock, address = listener.sock.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    # An exception would end the server and all connections. Wait until other connections have ended.
                    _log.error("failed to accept connections", error=str(error))
                    self._clock.sleep(0.05)
                elif error.errno not in _NO_CONNECTION_ERRORS:
                    raise
                return False
            self._admit(sock, address, listener)
        return True

    def _admit(self, sock: socket.socket, address: tuple[Any, ...], listener: Listener) -> None:
        source = httpcalls.client_network(address[0])
        client = self._clients.get(source) or _Client(self._clock)
        if len(client.connections) >= self._limits.source:
            _DROPPED_CONNECTIONS.labels("source").inc()
            sock.close()
            return
        sock.setblocking(False)
        secure = self._context is not None
        try:
            environ = httpcalls.shared_environ(address, sock.getsockname(), "https" if secure else "http")
            if secure:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, _TLS_RECORD_HEAD_BYTES)
        except OSError:
            sock.close()  # the client has closed already
            return
        environ |= {httpcalls.SOCKET_KEY: sock, httpcalls.SLOW_KEY: listener.slow}
        if listener.long:
            environ[httpcalls.LONG_OWNER_KEY] = None
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
        self._run_fairly(self._handshake_order, ready, step, _HANDSHAKE_SECONDS)

    def _begin_handshake(self, connection: _Connection) -> None:
        """Begin the handshake when the client's first record is complete.

        Until then the kernel keeps the received bytes and does not report the socket. So a client that sends slowly, or
        never, needs no TLS object and no processing.
        """
        sock = connection.sock
        head = sock.recv(_TLS_RECORD_HEAD_BYTES, socket.MSG_PEEK)
        wanted_bytes = _TLS_RECORD_HEAD_BYTES
        if head[:1] == bytes([_TLS_HANDSHAKE_RECORD_TYPE]):  # OpenSSL rejects other records
            wanted_bytes += min(int.from_bytes(head[3:]), _MAX_RECORD)
        # The kernel may report the socket with fewer bytes, after urgent data or without memory: then begin anyway.
        if wanted_bytes > connection.wanted_bytes and len(sock.recv(wanted_bytes, socket.MSG_PEEK)) < wanted_bytes:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted_bytes)
            connection.wanted_bytes = wanted_bytes
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
        # Waiting connections are still served. Later connections are refused at once, so clients try another replica.
        accept_until = self._clock.now() + _STOP_ACCEPT_SECONDS
        for number, listener in self._listeners.items():
            while self._accept_waiting(listener) and self._clock.now() < accept_until:
                pass
            self._poller.unregister(number)
            listener.sock.close()
        self._listeners.clear()
        self._bounds[ConnectionPhase.IDLE] = PhaseLimits(_IDLE_SECONDS_AFTER_STOP, self._limits.idle.max_connections)
        until = self._clock.now() + _IDLE_SECONDS_AFTER_STOP
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
            # the bytes are counted again below, for the new phase
            self._count_bytes(connection, client, -connection.held_bytes)
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
        if phase is not ConnectionPhase.BUSY:  # a BUSY connection can only be refused after its call was submitted
            self._drop_connections_over_memory_limit()

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
        """Drop a connection in the phase: the oldest connection of the address with the most connections there."""
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

    def _drop_connections_over_memory_limit(self) -> None:
        """Drop connections until all others together use no more than `Limits.held` bytes of memory."""
        while self._held_bytes > self._limits.held and self._drop_largest_connection():
            pass

    def _drop_largest_connection(self) -> bool:
        idle = self._queues[ConnectionPhase.IDLE, False]
        for client in sorted(self._clients.values(), key=lambda client: client.held_bytes, reverse=True):
            if idle and self._idle_held >= client.held_bytes:
                break
            if any(self._refuse_or_close(connection, "memory") for connection in client.connections_by_size()):
                return True
        return bool(idle) and self._refuse_or_close(next(iter(idle)), "memory")

    def _refuse_or_close(self, connection: _Connection, reason: str) -> bool:
        """Close the connection, unless a thread answers its call. A waiting call gets status 503. Returns whether the
        connection was closed.
        """
        if connection.phase is ConnectionPhase.BUSY:
            if not self._cancel(connection):
                return False
            connection.unsent = memoryview(httpcalls.refusal_response(HTTPStatus.SERVICE_UNAVAILABLE))
            connection.flush()
        self._drop(connection, reason)
        return True

    def _cancel(self, connection: _Connection) -> bool:
        """Remove the connection's call from the queue of its threads. Returns False if a thread answers the call or has
        answered it.
        """
        if connection.threads is None or connection.queued_call is None:
            return False
        return connection.threads.cancel(connection.queued_call)

    def _drop(self, connection: _Connection, reason: str) -> None:
        _DROPPED_CONNECTIONS.labels(reason).inc()
        self._close(connection)

    def _close(self, connection: _Connection) -> None:
        self._leave_phase(connection)
        self._detach_from_client(connection)
        del self._connections[connection.sock.fileno()]
        connection.reader.close()
        connection.queued_call = None  # the queued call refers to the connection
        connection.sock.close()  # this also removes it from its poller

    def _detach_from_client(self, connection: _Connection) -> None:
        """Stop counting the connection for its address, because the client has a certificate or the connection ends."""
        client = connection.client
        if client is None:
            return
        self._count_bytes(connection, client, -connection.held_bytes)
        del client.connections[connection]
        if not client.connections:
            del self._clients[connection.source]
        connection.client = None

    # The answering threads.

    def _answer_calls(self, connection: _Connection, flow: Flow) -> None:
        """Answer the call, and further calls of its flow on the connection while this thread may stay with it."""
        try:
            while True:
                self._answer_next(connection)
                if connection.close_after or connection.unsent or not self._has_next_call(connection, flow):
                    break
        except BaseException:
            connection.unsent, connection.close_after = (
                memoryview(b""),
                True,
            )  # otherwise the client would wait in vain, and would keep its slot
            raise
        finally:
            self._return_connection(connection)

    def _return_connection(self, connection: _Connection) -> None:
        """Return the connection to the server's thread; close it if that thread has ended."""
        with self._end_lock:
            if self._ended:
                connection.sock.close()
                return
            self._returned.put(connection)
            os.eventfd_write(self._wake, 1)

    def _answer_next(self, connection: _Connection) -> None:
        call = connection.reader.call
        if call is None:
            raise TypeError(connection.phase)
        call.environ[httpcalls.ARRIVED_KEY] = connection.arrived
        began = self._clock.now()
        try:
            answer = httpcalls.answer_call(self._app, call, lambda: not self._alive)
        except httpcalls.TakesLong:
            connection.seconds += self._clock.now() - began
            return
        except Exception:  # noqa: BLE001 - the outermost frame of a call; logged, and answered
            _log.exception("failed to answer a call", path=call.environ["PATH_INFO"])
            refusal = httpcalls.refusal_response(HTTPStatus.INTERNAL_SERVER_ERROR)
            answer = httpcalls.Answer(refusal, closes_connection=True)
        connection.close_after = answer.closes_connection
        connection.reader.call = None
        connection.seconds += self._clock.now() - began
        connection.unsent = memoryview(answer.response)
        if not connection.flush():
            connection.unsent, connection.close_after = memoryview(b""), True

    def _has_next_call(self, connection: _Connection, flow: Flow) -> bool:
        """Whether another call of the flow arrives on the connection while this thread may stay with it.

        A call of another owner, or for other threads, is returned to the server's thread, because the call may have to
        wait for a slot.
        """
        threads, owner = flow
        # Do not stay while a call waits: a staying thread occupies a slot of its owner and address.
        if connection.reader.call is not None or threads.is_busy(connection.limited_address, owner):
            return False
        return self._stay_for_next_call(connection, threads) and connection.next_flow == flow

    def _stay_for_next_call(self, connection: _Connection, threads: CallThreads) -> bool:
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
            if not connection.reader.has_begun:
                connection.arrived = self._clock.now()
            try:
                connection.close_after = not connection.receive()
                if not connection.close_after and connection.reader.call is None:
                    connection.close_after = not connection.send_continue()
            except BadHttpCall as error:
                connection.unsent, connection.close_after = memoryview(httpcalls.refusal_response(error.status)), True
            if connection.close_after or connection.reader.call is not None:
                return not connection.close_after
        return False
