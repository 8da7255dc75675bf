"""Connections to the API server with a deadline for the whole response.

urllib3 and http.client limit each wait for bytes, so a server that sends a byte now and then could hold its caller
for ever, in the headers or in the body. Here each read of the socket may take the time that is left until the
response's deadline. The deadline follows from the timeout that urllib3 sets when the connection begins to read.
"""

import http.client
import io
import socket
from typing import Any, Protocol

from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.response import HTTPResponse

from cardwise.clock import Clock


class _Waits(Protocol):
    """The limits for reads of a connection."""

    clock: Clock
    until: float | None  # the deadline of the response, by the clock; None: none
    silence: float | None  # seconds that one read may take; None: no limit


class _Socket(io.RawIOBase):
    """A socket's file whose reads fail after the response's deadline."""

    def __init__(self, sock: socket.socket, waits: _Waits) -> None:
        self._sock = sock
        # A file of the socket keeps the socket open until the file is closed.
        self._file = sock.makefile("rb", buffering=0)
        self._waits = waits

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        """Read into the buffer. Raises TimeoutError after the deadline."""
        waits = self._waits
        if waits.until is not None:
            remaining = waits.until - waits.clock.now()
            if remaining <= 0:
                raise TimeoutError("timed out: the response is not complete")
            self._sock.settimeout(remaining if waits.silence is None else min(remaining, waits.silence))
        return self._file.readinto(buffer)

    def close(self) -> None:
        self._file.close()
        super().close()


class _Answer:
    """Stands for the socket from which http.client reads a response."""

    def __init__(self, sock: socket.socket, waits: _Waits) -> None:
        self._sock = sock
        self._waits = waits

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(_Socket(self._sock, self._waits))


class _Timed(HTTPConnection):
    clock: Clock
    until: float | None = None
    silence: float | None = None

    def response_class(self, sock: socket.socket, *args: Any, **options: Any) -> http.client.HTTPResponse:  # type: ignore[override]
        return http.client.HTTPResponse(_Answer(sock, self), *args, **options)  # type: ignore[arg-type]

    def getresponse(self) -> HTTPResponse:  # type: ignore[override]
        seconds = self.timeout
        self.until = self.clock.now() + seconds if isinstance(seconds, int | float) else None
        self.silence = None
        return super().getresponse()


class _TimedTls(_Timed, HTTPSConnection):
    pass


def make_timed_connection(kind: type[Any], clock: Clock) -> type[HTTPConnection]:
    """The connection class `kind` of a connection pool, with deadlines by this clock."""
    base = _TimedTls if issubclass(kind, HTTPSConnection) else _Timed
    return type(base.__name__, (base,), {"clock": clock})


def extend_deadline(connection: object, *, silence: float | None, seconds: float) -> None:
    """Set the deadline of a response to `seconds` from now, and the limit of each wait for bytes to `silence`."""
    if isinstance(connection, _Timed):
        connection.until = connection.clock.now() + seconds
        connection.silence = silence
