"""Connections to the API server with a deadline for the whole response.

urllib3 and http.client limit only each single wait for bytes. So a server that sends a byte now and then, in the
headers or in the body, could block the caller for ever. Here each read of the socket may take only the time that is
left until the response's deadline. The deadline is computed from the timeout that urllib3 sets before it reads the
response.
"""

import http.client
import io
import socket
from typing import Any, Protocol

from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.response import HTTPResponse

from cardwise.clock import Clock


class _ReadLimits(Protocol):
    """The limits for reads of a connection."""

    clock: Clock
    deadline: float | None  # the deadline of the response, by the clock; None for no deadline
    max_silence: float | None  # seconds that one read may take; None for no limit


class _TimedSocketFile(io.RawIOBase):
    """A socket's file whose reads fail after the response's deadline."""

    def __init__(self, sock: socket.socket, limits: _ReadLimits) -> None:
        self._sock = sock
        # The socket stays open until this file is closed.
        self._file = sock.makefile("rb", buffering=0)
        self._limits = limits

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        """Read into the buffer. Raises TimeoutError after the deadline."""
        limits = self._limits
        if limits.deadline is not None:
            remaining = limits.deadline - limits.clock.now()
            if remaining <= 0:
                raise TimeoutError("timed out: the response is not complete")
            self._sock.settimeout(remaining if limits.max_silence is None else min(remaining, limits.max_silence))
        return self._file.readinto(buffer)

    def close(self) -> None:
        self._file.close()
        super().close()


class _TimedSocket:
    """A replacement for the socket from which http.client reads a response."""

    def __init__(self, sock: socket.socket, limits: _ReadLimits) -> None:
        self._sock = sock
        self._limits = limits

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(_TimedSocketFile(self._sock, self._limits))


class _TimedConnection(HTTPConnection):
    clock: Clock
    deadline: float | None = None
    max_silence: float | None = None

    def response_class(self, sock: socket.socket, *args: Any, **options: Any) -> http.client.HTTPResponse:  # type: ignore[override]
        return http.client.HTTPResponse(_TimedSocket(sock, self), *args, **options)  # type: ignore[arg-type]

    def getresponse(self) -> HTTPResponse:  # type: ignore[override]
        seconds = self.timeout
        self.deadline = self.clock.now() + seconds if isinstance(seconds, int | float) else None
        self.max_silence = None
        return super().getresponse()


class _TimedTlsConnection(_TimedConnection, HTTPSConnection):
    pass


def make_timed_connection(kind: type[Any], clock: Clock) -> type[HTTPConnection]:
    """The connection class `kind` of a connection pool, with deadlines by this clock."""
    base = _TimedTlsConnection if issubclass(kind, HTTPSConnection) else _TimedConnection
    return type(base.__name__, (base,), {"clock": clock})


def extend_deadline(connection: object, *, max_silence: float | None, seconds: float) -> None:
    """Set the deadline of a response to `seconds` from now, and the limit of each wait for bytes to `max_silence`."""
    if isinstance(connection, _TimedConnection):
        connection.deadline = connection.clock.now() + seconds
        connection.max_silence = max_silence
