"""An HTTP/1.1 server for WSGI applications that gives a call a thread only when the whole call has arrived.

One thread accepts connections, shakes hands and reads, never waiting for anybody. A client that is silent or slow, in
the handshake, a call or the reading of an answer, so costs a socket and some memory, until its time is over or others
need the place (`Limits`). Clients that have shown a certificate keep their place.

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
from cardwise.runtime.http import httpcalls
from cardwise.runtime.http.httpcalls import BadCall, Environ, Reader, WsgiApp
from cardwise.runtime.http.tlsline import TlsLine

_log = structlog.get_logger("cardwise.runtime.httpserver")

_ROUND_SECONDS: Final = 0.25  # at most, between two looks at what time is over
_ACCEPTS: Final = 32  # of one address in a round
_HANDSHAKE_SECONDS: Final = 0.002  # of work for handshakes in a round: clients that are in already come first
# RFC 8446, section 5.1: type, version and length stand before the content, which has at most this many bytes.
_RECORD_HEAD: Final = 5
_RECORD_MOST: Final = 16_384
_HANDSHAKE_RECORD: Final = 22
_READ_BYTES: Final = 65_536
_READS: Final = 8  # of one connection in a round
# Seconds that a thread stays with a connection after an answer, for the next call. kube-scheduler asks for one pod
# after the other on the same connection: handing it back between them costs more than most answers.
_STAY_SECONDS: Final = 0.1
_STAYING: Final = 16  # threads of a set that may do so; two are always left for whoever else comes
_SOURCES: Final = 8  # addresses that may hold all bytes that clients without a certificate may hold
_SMALL: Final = 32_768  # bytes of a call that is heard however much its address holds: a review of an ordinary pod
_MOST_BUSY: Final = 4000  # calls without a certificate, of all addresses together
# What accept(2) says when none waits, and of a connection that has failed already or that the machine keeps out.
_GONE: Final = frozenset({
    errno.EAGAIN, errno.ECONNABORTED, errno.EPROTO, errno.EPERM, errno.ENETDOWN, errno.ENOPROTOOPT, errno.EHOSTDOWN,
    errno.ENONET, errno.EHOSTUNREACH, errno.EOPNOTSUPP, errno.ENETUNREACH,
})  # fmt: skip
# Seconds that idle connections are kept when stopping: a call may be on its way already.
_STOP_SECONDS: Final = 2.0

_DROPPED = prometheus_client.Counter(
    "cardwise_http_dropped_connections_total",
    "Connections that the server has closed or refused because their clients were too slow or too many.",
    ["reason"],
)
for _reason in ("handshake", "reading", "writing", "crowded", "source", "memory"):
    _DROPPED.labels(_reason)  # there from the start: else the first of a kind would be no increase


class ConnectionPhase(Enum):
    """What a connection is waiting for; see the module."""

    HANDSHAKE = auto()
    IDLE = auto()
    READING = auto()
    BUSY = auto()
    WRITING = auto()
    CLOSING = auto()


class Bound(NamedTuple):
    """The limits of a phase: how long a connection may be in it, and how many connections without a certificate. If
    one more comes, the one that has been there longest is closed.
    """

    seconds: float
    most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What clients may cost. `idle_seconds`: Go's clients drop idle connections after 90 s. Were we the first to close,
    a call could meet the closing connection, and Go does not repeat a POST.

    `source`: connections of one address that have shown no certificate; more are refused. `busy`: calls of such an
    address that have come whole and are not answered yet; more are refused. `body`: bytes of one call. `held`: bytes
    of calls without a certificate that have not been answered yet, of which one address may have an eighth, or one
    call, and small ones besides.
    """

    handshake: Bound = Bound(2.0, 1000)
    idle: Bound = Bound(100.0, 2000)
    reading: Bound = Bound(10.0, 1000)
    writing: Bound = Bound(10.0, 1000)
    closing: Bound = Bound(2.0, 1000)
    busy: int = 250
    source: int = 500
    body: int = 8 << 20
    held: int = 64 << 20


class Threads:
    """Threads that answer calls, started as they are needed. Daemons: one that hangs keeps no process from its end.

    Where more is to be done than there are threads, those who ask take turns, so that nobody waits for all that another
    has asked; and in the turns of one, those for whom he asks.
    """

    def __init__(self, name: str, most: int) -> None:
        self.staying = threading.Semaphore(max(0, min(_STAYING, most - 2)))
        self._name = name
        self._left = most
        self._free = 0
        self._work: OrderedDict[str, OrderedDict[str, deque[Callable[[], None]]]] = OrderedDict()
        self._waiting = 0
        self._some = threading.Condition()

    @property
    def busy(self) -> bool:
        """Whether what is submitted now will wait."""
        return not self._left and self._waiting >= self._free

    def submit(self, work: Callable[[], None], asker: str = "", whose: str = "") -> None:
        """Queues the work for the next free thread. Askers take turns, and so do those that one asks for (`whose`)."""
        with self._some:
            self._work.setdefault(asker, OrderedDict()).setdefault(whose, deque()).append(work)
            self._waiting += 1
            if self._waiting <= self._free or not self._left:
                self._some.notify()
                return
            self._left -= 1
        threading.Thread(target=self._run, name=f"{self._name}_{self._left}", daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._some:
                self._free += 1
                while not self._work:
                    self._some.wait()
                self._free -= 1
                work = self._next()
            work()

    def _next(self) -> Callable[[], None]:
        asker, asked = next(iter(self._work.items()))
        whose, theirs = next(iter(asked.items()))
        work = theirs.popleft()
        self._waiting -= 1
        _had_turn(asked, whose)
        _had_turn(self._work, asker)
        return work


def _had_turn(waiting: OrderedDict[str, Any], who: str) -> None:
    if waiting[who]:
        waiting.move_to_end(who)
    else:
        del waiting[who]


Route = Callable[[Environ], Threads]


class Listener(NamedTuple):
    """A listening socket, and whose threads answer a call that came by it. `slow`: calls may wait there for long.

    `whose`: for whom a client calls, where one calls for many, who take turns then. Asked while all threads are busy,
    by the server's thread: it must be quick, and raise nothing.
    """

    sock: socket.socket
    route: Route
    slow: bool = False
    whose: Callable[[Environ], str] | None = None


class _Connection:
    """Belongs to the server's thread, and while it is BUSY to the thread that answers."""

    __slots__ = (
        "arrived", "authenticated", "deadline", "held", "last", "listener", "phase", "poller", "queue", "readable",
        "reader", "sock", "source", "tls", "unsent", "wanted",
    )  # fmt: skip

    def __init__(self, sock: socket.socket, source: str, listener: Listener, reader: Reader) -> None:
        self.sock = sock
        self.source = source
        self.listener = listener
        self.reader = reader
        self.authenticated = False
        self.arrived = 0.0  # when the call that is read or answered began to come
        self.last = False  # the connection ends with what is unsent
        self.unsent = memoryview(b"")
        self.held = 0  # bytes, as far as they are counted
        self.phase = ConnectionPhase.IDLE
        self.deadline = 0.0
        self.queue: OrderedDict[_Connection, None] | None = None
        self.poller: select.epoll | None = None
        self.readable: select.poll | None = None  # of the thread that stays with it
        self.wanted = _RECORD_HEAD  # bytes for which the kernel wakes us before there is TLS
        self.tls: TlsLine | None = None

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

    def invite(self) -> bool:
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


def _take(counter: Counter[str], source: str, amount: int) -> None:
    counter[source] -= amount
    if not counter[source]:
        del counter[source]


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
        self._bounds = {
            ConnectionPhase.HANDSHAKE: limits.handshake,
            ConnectionPhase.IDLE: limits.idle,
            ConnectionPhase.READING: limits.reading,
            ConnectionPhase.BUSY: Bound(float("inf"), _MOST_BUSY),
            ConnectionPhase.WRITING: limits.writing,
            ConnectionPhase.CLOSING: limits.closing,
        }
        # In each the next to be over is first, since all of a phase have the same time.
        self._queues: dict[tuple[ConnectionPhase, bool], OrderedDict[_Connection, None]] = {
            (phase, authenticated): OrderedDict() for phase in ConnectionPhase for authenticated in (False, True)
        }
        self._connections: dict[int, _Connection] = {}
        self._sources: Counter[str] = Counter()  # connections of addresses
        self._busy: Counter[str] = Counter()  # calls under way
        self._held = 0
        self._held_of: Counter[str] = Counter()
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
        self._wake_up()

    def run(self, tick: Callable[[], None] = lambda: None, graceful_seconds: float = 5.0) -> None:
        """Serves until `stop`, then for `graceful_seconds` at most. `tick` is called several times a second."""
        while self._alive:
            tick()
            self._round()
        self._stop_listening()
        until = self._clock.now() + graceful_seconds
        while self._connections and self._clock.now() < until:
            tick()
            self._round()
        self._ended = True
        for connection in list(self._connections.values()):
            if connection.phase is not ConnectionPhase.BUSY:
                self._close(connection)

    # The server's thread.

    def _round(self) -> None:
        ready, handshakes = [], False
        for number, _ in self._poller.poll(_ROUND_SECONDS):
            connection = self._connections.get(number)
            if connection is not None:
                self._safely(self._proceed, connection)
            elif number == self._wake:
                self._take_back()
            elif number in self._listeners:
                ready.append(self._listeners[number])
            else:
                handshakes = True
        # Only now: the number of a connection that was closed above may be given to a new one.
        for listener in ready:
            self._accept(listener, _ACCEPTS)
        if handshakes:
            self._shake_hands()
        self._end_what_is_over()

    def _proceed(self, connection: _Connection) -> None:
        """Something can be read or, where that is waited for, written."""
        if connection.phase is ConnectionPhase.WRITING:
            self._write(connection)
        elif connection.phase is ConnectionPhase.CLOSING:
            # Until the client closes too: with bytes unread, our closing would take the answer back.
            with contextlib.suppress(BlockingIOError):
                if not connection.sock.recv(_READ_BYTES):
                    self._close(connection)
        else:
            self._read(connection)

    def _safely(self, step: Callable[[_Connection], None], connection: _Connection) -> None:
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
        except BadCall as error:
            self._refuse(connection, error.status)
            return
        if connection.reader.calls:
            self._have_answered(connection)
        elif not connection.invite():
            self._close(connection)
        elif connection.reader.begun and connection.phase is ConnectionPhase.IDLE:
            self._enter(connection, ConnectionPhase.READING, self._poller, select.EPOLLIN)
        else:
            self._count(connection)

    def _have_answered(self, connection: _Connection) -> None:
        waiting, source = self._queues[ConnectionPhase.BUSY, False], connection.source
        if not connection.authenticated and (self._busy[source] >= self._limits.busy or len(waiting) >= _MOST_BUSY):
            self._refuse(connection, HTTPStatus.SERVICE_UNAVAILABLE)
            return
        self._enter(connection, ConnectionPhase.BUSY, None)
        environ, listener = connection.reader.calls[0].environ, connection.listener
        threads = listener.route(environ)
        asker = "" if connection.authenticated else source
        whose = listener.whose(environ) if listener.whose is not None and threads.busy else ""
        threads.submit(lambda: self._answer(connection, threads), asker, whose)

    def _refuse(self, connection: _Connection, status: HTTPStatus) -> None:
        connection.unsent, connection.last = memoryview(httpcalls.refusal(status)), True
        self._write(connection)

    def _write(self, connection: _Connection) -> None:
        if not connection.send():
            self._close(connection)
        elif connection.unsent:
            if connection.phase is not ConnectionPhase.WRITING:
                self._enter(connection, ConnectionPhase.WRITING, self._poller, select.EPOLLOUT)
        elif connection.last:
            self._bid_farewell(connection)
        elif connection.reader.calls:
            self._have_answered(connection)
        elif not connection.invite():
            self._close(connection)
        else:
            phase = ConnectionPhase.READING if connection.reader.begun else ConnectionPhase.IDLE
            self._enter(connection, phase, self._poller, select.EPOLLIN)

    def _bid_farewell(self, connection: _Connection) -> None:
        if connection.tls is not None:
            connection.tls.unwrap()
        connection.sock.shutdown(socket.SHUT_WR)
        self._enter(connection, ConnectionPhase.CLOSING, self._poller, select.EPOLLIN)

    def _take_back(self) -> None:
        """Connections whose calls have been answered."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        with contextlib.suppress(queue.Empty):
            while True:
                self._safely(self._write, self._handed_back.get_nowait())

    def _accept(self, listener: Listener, most: int) -> bool:
        """Whether more may be waiting."""
        for _ in range(most):
            try:
                sock, address = listener.sock.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    # Raising would end the server and with it every connection. Give the others a moment to end.
                    _log.error("cannot accept connections", error=str(error))
                    self._clock.sleep(0.05)
                elif error.errno not in _GONE:
                    raise
                return False
            self._admit(sock, address, listener)
        return True

    def _admit(self, sock: socket.socket, address: tuple[Any, ...], listener: Listener) -> None:
        source = address[0]
        if self._sources[source] >= self._limits.source:
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
        connection = _Connection(sock, source, listener, Reader(environ, self._limits.body))
        self._connections[sock.fileno()] = connection
        self._sources[source] += 1
        if secure:
            self._enter(connection, ConnectionPhase.HANDSHAKE, self._handshakes, select.EPOLLIN | select.EPOLLRDHUP)
        else:
            self._enter(connection, ConnectionPhase.IDLE, self._poller, select.EPOLLIN)

    def _shake_hands(self) -> None:
        until = self._clock.now() + _HANDSHAKE_SECONDS
        for number, events in self._handshakes.poll(0, 64):
            connection = self._connections[number]
            if connection.tls is not None:
                self._safely(self._shake_hand, connection)
            elif events & select.EPOLLRDHUP:
                self._close(connection)
            else:
                self._safely(self._begin_handshake, connection)
            if self._clock.now() >= until:
                break

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
        connection.tls = TlsLine(sock, self._context())
        self._shake_hand(connection)

    def _shake_hand(self, connection: _Connection) -> None:
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
            self._leave(connection)
            _take(self._sources, connection.source, 1)
            connection.authenticated = True
        self._enter(connection, ConnectionPhase.IDLE, self._poller, select.EPOLLIN)
        if connection.tls.pending:
            self._read(connection)

    def _end_what_is_over(self) -> None:
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
        for number, listener in self._listeners.items():
            while self._accept(listener, _ACCEPTS):
                pass
            self._poller.unregister(number)
            listener.sock.close()
        self._listeners.clear()
        self._bounds[ConnectionPhase.IDLE] = Bound(_STOP_SECONDS, self._limits.idle.most)
        until = self._clock.now() + _STOP_SECONDS
        for authenticated in (False, True):
            for connection in self._queues[ConnectionPhase.IDLE, authenticated]:
                connection.deadline = min(connection.deadline, until)

    def _enter(
        self, connection: _Connection, phase: ConnectionPhase, poller: select.epoll | None, events: int = 0
    ) -> None:
        self._leave(connection)
        waiting, bound = self._queues[phase, connection.authenticated], self._bounds[phase]
        if not connection.authenticated and len(waiting) >= bound.most:
            self._drop(next(iter(waiting)), "crowded")
        if phase is ConnectionPhase.BUSY and not connection.authenticated:
            self._busy[connection.source] += 1
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
        self._count(connection)

    def _leave(self, connection: _Connection) -> None:
        if connection.queue is not None:
            if connection.phase is ConnectionPhase.BUSY and not connection.authenticated:
                _take(self._busy, connection.source, 1)
            del connection.queue[connection]
            connection.queue = None

    def _count(self, connection: _Connection) -> None:
        """What the connection holds; where all of them hold too much, those go that have been at it longest."""
        if connection.authenticated:
            return
        holds = connection.reader.held + len(connection.unsent)
        self._hold(connection, holds - connection.held)
        mine = self._held_of[connection.source]
        if mine > max(self._limits.held // _SOURCES, self._limits.body) and mine > holds > _SMALL:
            if connection.phase is not ConnectionPhase.BUSY:
                self._drop(connection, "memory")
            return
        for phase in (ConnectionPhase.READING, ConnectionPhase.WRITING):
            waiting = self._queues[phase, False]
            while self._held > self._limits.held and waiting:
                self._drop(next(iter(waiting)), "memory")

    def _hold(self, connection: _Connection, more: int) -> None:
        connection.held += more
        self._held += more
        _take(self._held_of, connection.source, -more)

    def _drop(self, connection: _Connection, reason: str) -> None:
        _DROPPED.labels(reason).inc()
        self._close(connection)

    def _close(self, connection: _Connection) -> None:
        self._leave(connection)
        self._hold(connection, -connection.held)
        if not connection.authenticated:
            _take(self._sources, connection.source, 1)
        del self._connections[connection.sock.fileno()]
        connection.reader.close()
        connection.sock.close()  # which takes it from its poller

    def _wake_up(self) -> None:
        os.eventfd_write(self._wake, 1)

    # The threads that answer.

    def _answer(self, connection: _Connection, threads: Threads) -> None:
        """The call, and those that follow on the connection while this thread may stay with it."""
        while True:
            self._answer_one(connection)
            if connection.last or connection.unsent or not self._next_call(connection, threads):
                break
        if self._ended:
            connection.sock.close()
            return
        self._handed_back.put(connection)
        self._wake_up()

    def _answer_one(self, connection: _Connection) -> None:
        call = connection.reader.calls.popleft()
        call.environ[httpcalls.ARRIVED] = connection.arrived
        try:
            answer, connection.last = httpcalls.answered(self._app, call, lambda: not self._alive)
        except Exception:  # noqa: BLE001 - the outermost frame of a call; logged, and answered
            _log.exception("call failed", path=call.environ["PATH_INFO"])
            answer, connection.last = httpcalls.refusal(HTTPStatus.INTERNAL_SERVER_ERROR), True
        connection.unsent = memoryview(answer)
        if not connection.send():
            connection.unsent, connection.last = memoryview(b""), True

    def _next_call(self, connection: _Connection, threads: Threads) -> bool:
        """Whether another call came on the connection while this thread could stay with it."""
        if connection.reader.calls:
            return connection.authenticated and connection.listener.whose is None  # others take turns
        if connection.listener.whose is not None and threads.busy:
            return False
        if not self._alive or not threads.staying.acquire(blocking=False):
            return False
        try:
            return self._stay(connection)
        finally:
            threads.staying.release()

    def _stay(self, connection: _Connection) -> bool:
        if connection.readable is None:
            connection.readable = select.poll()
            connection.readable.register(connection.sock, select.POLLIN)
        until = self._clock.now() + _STAY_SECONDS
        while (left := until - self._clock.now()) > 0 and connection.readable.poll(left * 1000):
            if not connection.reader.begun:
                connection.arrived = self._clock.now()
            try:
                connection.last = not connection.receive()
                if not connection.last and not connection.reader.calls:
                    connection.last = not connection.invite()
            except BadCall as error:
                connection.unsent, connection.last = memoryview(httpcalls.refusal(error.status)), True
            if connection.last or connection.reader.calls:
                return not connection.last
        return False
