"""A server in a thread, and helpers that send calls to it over loopback."""

import contextlib
import http.client
import socket
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path

from cardwise.runtime.http import httpcalls
from cardwise.runtime.http.httpcalls import Environ
from cardwise.runtime.http.httpserver import HttpServer, Limits, Listener
from cardwise.runtime.http.threads import CallThreads
from tests.fakes.clock import FakeClock

PATIENCE = 60.0  # seconds after which a broken test fails
BIG = 8 << 20  # bytes of a response, more than the kernel's buffers take

Contexts = Callable[[], ssl.SSLContext]


class Serving:
    """A server with a clock that stands still. /wait waits for `released`; /long does so on the threads for long calls
    (its query is the owner); /big returns more than a socket accepts at once.
    """

    def __init__(
        self, limits: Limits, context: Contexts | None, threads: int, call_owner: Callable[[Environ], str] | None = None
    ) -> None:
        self.clock = FakeClock()
        self.released = threading.Event()
        self.waiting = threading.Semaphore(0)
        self.arrived: list[float] = []
        self.paths: list[str] = []
        self.lines: list[socket.socket] = []
        listening = socket.create_server(("127.0.0.1", 0))
        self.port = listening.getsockname()[1]
        self.pool = pool = CallThreads("fast", threads)
        self.long_pool = long_pool = CallThreads("long", 2)

        def route(environ: Environ) -> CallThreads:
            return pool if environ[httpcalls.LONG_OWNER_KEY] is None else long_pool

        self.server = HttpServer(
            self.app,
            [Listener(listening, route, long=True, call_owner=call_owner)],
            context=context,
            limits=limits,
            clock=self.clock,
        )
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()

    def app(self, environ, start_response):
        self.arrived.append(environ[httpcalls.ARRIVED_KEY])
        self.paths.append(environ["PATH_INFO"])
        if environ["PATH_INFO"] == "/long" and environ[httpcalls.LONG_OWNER_KEY] is None:
            environ["wsgi.input"].read()
            httpcalls.move_long_call(environ, environ["QUERY_STRING"])
        if environ["PATH_INFO"] in ("/wait", "/long"):
            self.waiting.release()
            assert self.released.wait(PATIENCE)
        start_response("200 OK", [])
        if environ["PATH_INFO"] == "/big":
            return [b"x" * BIG]
        return [environ["wsgi.input"].read() or b"ok"]

    def connect(self, source: str = "127.0.0.1", context: ssl.SSLContext | None = None) -> socket.socket:
        line = socket.create_connection(("127.0.0.1", self.port), PATIENCE, source_address=(source, 0))
        if context is not None:
            line = context.wrap_socket(line, server_hostname="127.0.0.1")
        self.lines.append(line)
        return line

    def get(self, path: str = "/", source: str = "127.0.0.1", context: ssl.SSLContext | None = None) -> bytes:
        return get(self.port, path, context, source)

    def stop(self) -> None:
        for line in self.lines:
            line.close()
        self.released.set()
        self.server.stop()
        self.clock.advance(1000)
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()


def client(certificates: Path, *, show: bool = True) -> ssl.SSLContext:
    """The TLS context of a client, with its certificate if `secure`."""
    context = ssl.create_default_context(cafile=certificates / "ca.crt")
    if show:
        context.load_cert_chain(certificates / "client.crt", certificates / "client.key")
    return context


def get(port: int, path: str, context: ssl.SSLContext | None = None, source: str = "127.0.0.1") -> bytes:
    """Send a GET on a new connection."""
    options = {"timeout": PATIENCE, "source_address": (source, 0)}
    with contextlib.closing(
        http.client.HTTPSConnection("127.0.0.1", port, context=context, **options)
        if context is not None
        else http.client.HTTPConnection("127.0.0.1", port, **options)
    ) as line:
        line.request("GET", path)
        response = line.getresponse()
        assert response.status == 200
        return response.read()


def send_get(line: socket.socket, path: str = "/") -> None:
    line.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())


def answer(line: socket.socket) -> bytes:
    """Read one response from a connection; bytes after it are lost."""
    with contextlib.closing(http.client.HTTPResponse(line)) as response:
        response.begin()
        assert response.status == 200
        return response.read()


def until(ready: Callable[[], bool], condition: str) -> None:
    """Wait until the condition holds, by polling."""
    deadline = time.monotonic() + PATIENCE
    while not ready():
        assert time.monotonic() < deadline, f"{condition} has not come true"


def until_refused(port: int) -> None:
    """Wait until the address refuses connections."""
    until(lambda: not accepts(port), f"that nobody listens on port {port}")


def accepts(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), PATIENCE).close()
    except ConnectionRefusedError:
        return False
    except ConnectionResetError:
        pass  # this connection was in the backlog when the socket was closed; the next one is refused
    return True
