"""gunicorn's thread worker, made safe against clients that hang, and with a second set of threads for one port.

Apart from `serving` because it leans on gunicorn's internals: what a new gunicorn may break is in this file.
Stock gthread gives every new connection a thread at once and no time limit to the TLS handshake or to reads, so four
silent clients stop four threads; and it lingers for up to two seconds in its main loop over a connection it closes.
"""

import contextlib
import errno
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from selectors import EVENT_READ
from typing import Any

import structlog
from gunicorn import util
from gunicorn.workers.gthread import TConn, ThreadWorker

from cardwise.runtime import plaincalls

_log = structlog.get_logger(__name__)

# In the WSGI environ: the time.monotonic() at which the call could be read. It may have waited for a thread since.
ARRIVED = "cardwise.arrived"
# In the WSGI environ: call it, and the connection is closed after the answer. gunicorn ignores the header for it.
CLOSE = "cardwise.close"
# In the WSGI environ: whether the call may wait for long, having a thread of the second set.
SLOW = "cardwise.slow"
# In the WSGI environ, gunicorn's: the socket of the connection.
SOCKET = "gunicorn.socket"
# Seconds without a byte, inside a handshake or a request, before a client is given up.
IO_SECONDS = 10.0
# Seconds that a new connection may stay silent. It holds no thread meanwhile.
FIRST_BYTE_SECONDS = 30.0
# Seconds that a thread waits for the first call after a handshake.
_FIRST_CALL_SECONDS = 0.02
# Seconds that a thread stays with a connection after an answer, for the next call. kube-scheduler asks for one pod
# after the other on the same connection: going back to the main loop between them costs more than most answers.
_STAY_SECONDS = 0.1
_STAYING = 16  # slow threads that may do so; of the others two are always left for whoever else comes
# Seconds that silent new connections stay open when stopping.
_STOP_LINGER = 1.0


class _Bounded:
    """Mixed into sockets: "blocking" means with a time limit, and a time-out is a lost connection."""

    def setblocking(self, flag: bool) -> None:
        super().settimeout(IO_SECONDS if flag else 0.0)  # type: ignore[misc]

    def recv(self, *args: Any) -> bytes:
        try:
            return super().recv(*args)  # type: ignore[misc,no-any-return]
        except TimeoutError as error:
            # What gunicorn takes quietly for a client that went away.
            raise ConnectionResetError(errno.ECONNRESET, "client too slow") from error


class _PlainSocket(_Bounded, socket.socket):
    pass


class _TlsSocket(_Bounded, ssl.SSLSocket):
    def do_handshake(self, block: bool = False) -> None:
        try:
            super().do_handshake(block)
        except TimeoutError as error:
            raise ConnectionResetError(errno.ECONNRESET, "client too slow in the handshake") from error


def server_context(cert: Path, key: Path, client_ca: Path | None) -> ssl.SSLContext:
    """TLS 1.2 and up; with `client_ca`, clients must show a certificate of it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.sslsocket_class = _TlsSocket
    context.load_cert_chain(cert, key)
    if client_ca is not None:
        context.load_verify_locations(cafile=client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


class _Connection(TConn):  # type: ignore[misc]
    """`silent`: the handshake is done, and the client asks nothing yet."""

    slow = False
    silent = False
    tls = False  # asked of gunicorn's settings for every call, it would cost as much as reading the call
    arrived = 0.0
    closers: ThreadPoolExecutor
    readable: "select.poll | None" = None

    def init(self) -> None:
        fresh = not self.initialized
        super().init()
        if fresh and self.tls and not self.speaks(_FIRST_CALL_SECONDS):
            # Go's clients open more connections than they use in the end. A thread is not for waiting for these.
            self.silent = True
            raise StopIteration("no call yet")  # what gunicorn takes quietly, see Worker.handle

    def speaks(self, seconds: float) -> bool:
        """Whether there is something to read within this time."""
        if self.tls and self.sock.pending():
            return True
        if self.readable is None:
            self.readable = select.poll()
            self.readable.register(self.sock, select.POLLIN)
        return bool(self.readable.poll(seconds * 1000))

    def close(self, graceful: bool = False) -> None:
        if graceful:
            # Lingers until the client has closed too: not in the main loop.
            with contextlib.suppress(RuntimeError):
                self.closers.submit(util.close_graceful, self.sock)
                return
        util.close(self.sock)


class Worker(ThreadWorker):  # type: ignore[misc]
    """See the module. `slow`, `slow_threads` and `stopping` are set by `worker_class`."""

    slow = False
    stopping: Callable[[], None] | None = None
    slow_threads = 64
    wsgi: Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]

    def init_process(self) -> None:
        self._slow_pool = ThreadPoolExecutor(self.slow_threads, thread_name_prefix="slow")
        self._closers = ThreadPoolExecutor(4, thread_name_prefix="close")
        self._may_stay = {
            False: threading.Semaphore(max(0, self.cfg.threads - 2)),
            True: threading.Semaphore(min(_STAYING, max(0, self.slow_threads - 2))),
        }
        self._current = threading.local()
        super().init_process()

    def get_thread_pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self.cfg.threads, thread_name_prefix="fast")

    def accept(self, listener: Any) -> None:
        try:
            accepted, address = listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                # Raising would end the worker and with it every connection. Give the others a moment to end.
                _log.error("cannot accept connections", error=str(error))
                time.sleep(0.05)
            elif error.errno not in (errno.EAGAIN, errno.ECONNABORTED, errno.EWOULDBLOCK, errno.EPROTO):
                raise
            return
        connection = _Connection(self.cfg, _PlainSocket(fileno=accepted.detach()), address, listener.getsockname())
        connection.closers = self._closers
        connection.tls = self.cfg.is_ssl
        # serving puts the slow address last.
        connection.slow = self.slow and listener is self.sockets[-1]
        connection.timeout = time.monotonic() + FIRST_BYTE_SECONDS
        self.nr_conns += 1
        # To the poller, not to a thread: a thread is for somebody who has said something.
        self.pending_conns.append(connection)
        self.poller.register(connection.sock, EVENT_READ, partial(self.on_pending_socket_readable, connection))

    def load_wsgi(self) -> None:
        super().load_wsgi()
        app = self.wsgi

        def stamped(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
            environ[ARRIVED] = self._current.arrived
            environ[SLOW] = self._current.slow
            environ[CLOSE] = start_response.__self__.force_close  # type: ignore[attr-defined]
            return app(environ, start_response)

        self.wsgi = stamped

    def handle(self, conn: _Connection) -> Any:
        while True:
            self._current.arrived = conn.arrived
            self._current.slow = conn.slow
            result = self._answer_plain(conn)
            if result is None:
                result = super().handle(conn)
            if conn.silent:
                conn.silent = False
                return True  # to the poller, like a connection whose call has been answered
            if result is not True or not self._next_call(conn):
                return result
            conn.arrived = time.monotonic()

    def _answer_plain(self, conn: _Connection) -> bool | None:
        """Whether the connection stays, once a plain call has been answered; None where the call is gunicorn's.

        Saves 0.07 ms of CPU a call and more (docs/measured.md). gunicorn has the first one of a connection: it begins
        that.
        """
        if not conn.initialized or conn.is_http2 or conn.parser.unreader.buf.getvalue():
            return None
        try:
            conn.sock.setblocking(True)
            call = plaincalls.read(conn.sock, conn.client, conn.server, "https" if conn.tls else "http")
            if isinstance(call, bytes):
                conn.parser.unreader.unread(call)
                return None if call else False
            call.environ[SOCKET] = conn.sock
            answer = plaincalls.Answer(close=not self.alive)
            try:
                body = b"".join(self.wsgi(call.environ, answer.start_response))
            except Exception:  # noqa: BLE001 - the outermost frame of a call; logged, and answered
                _log.exception("call failed", path=call.environ["PATH_INFO"])
                conn.sock.sendall(plaincalls.refusal())
                return False
            conn.sock.sendall(answer.encoded(body))
        except OSError:
            return False  # the client is gone, or too slow
        conn.parser.unreader.unread(call.rest)
        return not answer.close

    def _next_call(self, conn: _Connection) -> bool:
        """Whether another call came on the connection while this thread could stay with it."""
        if not self.alive or conn.parser.unreader.buf.getvalue():
            return False  # what has been read already does not make the socket readable; gunicorn looks for it
        staying = self._may_stay[conn.slow]
        if not staying.acquire(blocking=False):
            return False
        try:
            return conn.speaks(_STAY_SECONDS)
        finally:
            staying.release()

    def enqueue_req(self, conn: _Connection) -> None:
        conn.arrived = time.monotonic()
        pool = self._slow_pool if conn.slow else self.tpool
        future = pool.submit(self.handle, conn)
        future.add_done_callback(lambda done: self.method_queue.defer(self.finish_request, conn, done))

    def set_accept_enabled(self, enabled: bool) -> None:
        super().set_accept_enabled(enabled)
        if not enabled and not self.alive:
            # The first step of stopping.
            if self.stopping is not None:
                self.stopping()
            # Who has connected already is answered; who connects from now on is refused at once, and finds another.
            for listener in self.sockets:
                before = -1
                while self.nr_conns > before:
                    before = self.nr_conns
                    self.accept(listener)
                listener.close()
            limit = time.monotonic() + _STOP_LINGER
            for connection in self.pending_conns:
                connection.timeout = min(connection.timeout, limit)

    def run(self) -> None:
        super().run()
        self._slow_pool.shutdown(wait=False, cancel_futures=True)
        self._closers.shutdown(wait=False)


def worker_class(*, slow: bool, slow_threads: int, stopping: Callable[[], None] | None = None) -> type[Worker]:
    """With `slow`, the last address is served by a second pool of `slow_threads` threads.

    `stopping`: called when the worker begins to stop, while calls are still under way.
    """
    settings = {"slow": slow, "slow_threads": slow_threads, "stopping": stopping and staticmethod(stopping)}
    return type("CardwiseWorker", (Worker,), settings)
