"""A small HTTP server for several sockets in the caller's own thread: requests without a body, one per connection.

Its own, because the standard library's brings as much memory as all else here together. Whoever connects is a
stranger: nobody is waited for, nobody sends much, and only so many are listened to at a time.
"""

import selectors
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from cardwise.clock import SYSTEM, Clock

_PATIENCE = 5.0  # seconds for a whole request and its answer
_LONGEST = 4096  # bytes of a request
_MOST = 16  # connections at a time
_BACKLOG = 16
_MAY_CONNECT = 0o666
_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to a request."""

    status: int
    body: str
    kind: str = "text/plain; charset=utf-8"


@dataclass(slots=True)
class _Connection:
    socket: socket.socket
    listener: str
    deadline: float
    request: bytes = b""
    answer: memoryview = field(default_factory=lambda: memoryview(b""))


class Endpoint:
    """`answer` is called with the listener's name and the path."""

    def __init__(self, answer: Callable[[str, str], Reply], clock: Clock = SYSTEM) -> None:
        self._answer = answer
        self._clock = clock
        self._selector = selectors.DefaultSelector()
        self._listeners: list[socket.socket] = []
        self._connections: list[_Connection] = []

    def listen_unix(self, path: Path, name: str) -> None:
        """Over what a former agent left there. Open to every user of the pod. Raises OSError."""
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(str(path))
            path.chmod(_MAY_CONNECT)
        except OSError:
            listener.close()
            raise
        self._listen(listener, name)

    def listen_tcp(self, port: int, name: str) -> int:
        """On all addresses; 0 takes any port. Returns the port. Raises OSError."""
        family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        listener = socket.create_server(("", port), family=family, dualstack_ipv6=family is socket.AF_INET6)
        self._listen(listener, name)
        return int(listener.getsockname()[1])

    def serve(self, seconds: float) -> None:
        """Answers for so long."""
        end = self._clock.now() + seconds
        while (now := self._clock.now()) < end:
            self.go_on(min([end, *(one.deadline for one in self._connections)]) - now)

    def go_on(self, seconds: float) -> None:
        """Does what there is to do at present; where there is nothing, it waits so long for something."""
        self._drop_late()
        for key, _ in self._selector.select(max(0.0, seconds)):
            if isinstance(key.data, _Connection):
                self._go_on(key.data)
            else:
                self._accept(*key.data)

    def close(self) -> None:
        for connection in list(self._connections):
            self._drop(connection)
        for listener in self._listeners:
            listener.close()
        self._selector.close()

    def _listen(self, listener: socket.socket, name: str) -> None:
        listener.listen(_BACKLOG)
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, (listener, name))
        self._listeners.append(listener)

    def _accept(self, listener: socket.socket, name: str) -> None:
        try:
            accepted, _ = listener.accept()
        except OSError:
            return  # it has gone again
        if len(self._connections) >= _MOST:
            self._drop(self._connections[0])
        accepted.setblocking(False)
        connection = _Connection(accepted, name, self._clock.now() + _PATIENCE)
        self._connections.append(connection)
        self._selector.register(accepted, selectors.EVENT_READ, connection)

    def _go_on(self, connection: _Connection) -> None:
        if connection not in self._connections:
            return  # dropped for another one in the same round
        try:
            if not connection.answer:
                self._read(connection)
            else:
                connection.answer = connection.answer[connection.socket.send(connection.answer) :]
                if not connection.answer:
                    self._drop(connection)
        except BlockingIOError:
            pass
        except OSError:
            self._drop(connection)

    def _read(self, connection: _Connection) -> None:
        more = connection.socket.recv(_LONGEST)
        connection.request += more
        if not more or len(connection.request) > _LONGEST:
            self._drop(connection)
        elif b"\r\n\r\n" in connection.request:
            connection.answer = memoryview(_encoded(self._answered(connection)))
            self._selector.modify(connection.socket, selectors.EVENT_WRITE, connection)

    def _answered(self, connection: _Connection) -> Reply:
        words = connection.request.split(b"\r\n", 1)[0].decode("ascii", "replace").split()
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return Reply(400, "no HTTP request\n")
        if words[0] != "GET":
            return Reply(405, "only GET\n")
        return self._answer(connection.listener, words[1].partition("?")[0])

    def _drop_late(self) -> None:
        now = self._clock.now()
        for connection in [one for one in self._connections if one.deadline <= now]:
            self._drop(connection)

    def _drop(self, connection: _Connection) -> None:
        self._connections.remove(connection)
        self._selector.unregister(connection.socket)
        connection.socket.close()


def _encoded(answer: Reply) -> bytes:
    body = answer.body.encode()
    head = (
        f"HTTP/1.1 {answer.status} {_REASONS[answer.status]}\r\nContent-Type: {answer.kind}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
