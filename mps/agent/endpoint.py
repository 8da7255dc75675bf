"""A small HTTP server that serves several sockets in the caller's thread. It reads only requests without a body.

Each connection serves one request. The standard library's server would need as much memory as the rest of the agent.
Clients are untrusted: no client can block the thread, send much data, or hold more than a few connections.
"""

import selectors
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from cardwise.clock import SYSTEM, Clock

_REQUEST_SECONDS = 5.0  # maximum time of one request and its response
_MAX_REQUEST_BYTES = 4096  # maximum size of a request
_MAX_CONNECTIONS = 16  # maximum number of open connections
_BACKLOG = 16
_SOCKET_MODE = 0o666
_REASON_PHRASES = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    503: "Service Unavailable",
}


@dataclass(frozen=True, slots=True)
class Response:
    """The response to a request."""

    status: int
    body: str
    content_type: str = "text/plain; charset=utf-8"


@dataclass(slots=True)
class _Connection:
    socket: socket.socket
    listener: str
    deadline: float
    request: bytes = b""
    response: memoryview = field(default_factory=lambda: memoryview(b""))


class Endpoint:
    """An HTTP server that listens on several sockets.

    handle: called with the listener's name and the path of the request; returns the response.
    """

    def __init__(self, handle: Callable[[str, str], Response], clock: Clock = SYSTEM) -> None:
        self._handle = handle
        self._clock = clock
        self._selector = selectors.DefaultSelector()
        self._listeners: list[socket.socket] = []
        self._connections: list[_Connection] = []

    def listen_unix(self, path: Path, name: str) -> None:
        """Listen on a Unix socket that every user of the pod may use.

        Replaces a former agent's socket. Raises OSError.
        """
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(str(path))
            path.chmod(_SOCKET_MODE)
        except OSError:
            listener.close()
            raise
        self._add_listener(listener, name)

    def serve(self, seconds: float) -> None:
        """Serve requests for this many seconds."""
        end = self._clock.now() + seconds
        while (now := self._clock.now()) < end:
            self.serve_once(min([end, *(connection.deadline for connection in self._connections)]) - now)

    def serve_once(self, seconds: float) -> None:
        """Handle the pending requests; waits up to `seconds` for the first one."""
        self._drop_expired()
        for key, _ in self._selector.select(max(0.0, seconds)):
            if isinstance(key.data, _Connection):
                self._serve_connection(key.data)
            else:
                self._accept(*key.data)

    def close(self) -> None:
        for connection in list(self._connections):
            self._drop(connection)
        for listener in self._listeners:
            listener.close()
        self._selector.close()

    def _add_listener(self, listener: socket.socket, name: str) -> None:
        listener.listen(_BACKLOG)
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, (listener, name))
        self._listeners.append(listener)

    def _accept(self, listener: socket.socket, name: str) -> None:
        try:
            client_socket, _ = listener.accept()
        except OSError:
            return  # the client has disconnected
        if len(self._connections) >= _MAX_CONNECTIONS:
            self._drop(self._connections[0])
        client_socket.setblocking(False)
        connection = _Connection(client_socket, name, self._clock.now() + _REQUEST_SECONDS)
        self._connections.append(connection)
        self._selector.register(client_socket, selectors.EVENT_READ, connection)

    def _serve_connection(self, connection: _Connection) -> None:
        if connection not in self._connections:
            return  # this pass has closed the connection to accept another connection
        try:
            if not connection.response:
                self._read_request(connection)
            else:
                connection.response = connection.response[connection.socket.send(connection.response) :]
                if not connection.response:
                    self._drop(connection)
        except BlockingIOError:
            pass
        except OSError:
            self._drop(connection)

    def _read_request(self, connection: _Connection) -> None:
        received = connection.socket.recv(_MAX_REQUEST_BYTES)
        connection.request += received
        if not received or len(connection.request) > _MAX_REQUEST_BYTES:
            self._drop(connection)
        elif b"\r\n\r\n" in connection.request:
            connection.response = memoryview(_encode_response(self._handle_request(connection)))
            self._selector.modify(connection.socket, selectors.EVENT_WRITE, connection)

    def _handle_request(self, connection: _Connection) -> Response:
        request_line = connection.request.split(b"\r\n", 1)[0].decode("ascii", "replace").split()
        if len(request_line) != 3 or not request_line[2].startswith("HTTP/1."):
            return Response(400, "not an HTTP request\n")
        if request_line[0] != "GET":
            return Response(405, "only GET is supported\n")
        return self._handle(connection.listener, request_line[1].partition("?")[0])

    def _drop_expired(self) -> None:
        now = self._clock.now()
        for connection in [connection for connection in self._connections if connection.deadline <= now]:
            self._drop(connection)

    def _drop(self, connection: _Connection) -> None:
        self._connections.remove(connection)
        self._selector.unregister(connection.socket)
        connection.socket.close()


def _encode_response(response: Response) -> bytes:
    body = response.body.encode()
    head = (
        f"HTTP/1.1 {response.status} {_REASON_PHRASES[response.status]}\r\nContent-Type: {response.content_type}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
