"""Connections to the API server whose answers have a deadline.

urllib3 and http.client bound each wait for bytes. A server that sends a byte now and then would hold its caller for as
long as it likes, in the headers as well as in the body. Here each read of the socket gets the time that is left for the
whole answer, of the answer's time-out: that which urllib3 gives to the connection when it begins to read.
"""

import http.client
import io
import socket
from typing import Any, Protocol

from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.response import HTTPResponse

from cardwise.clock import Clock


class _Waits(Protocol):
    """How long reads of a connection may take, and until when."""

    clock: Clock
    until: float | None  # no bytes of the answer after this; None: no such time
    silence: float | None  # seconds that one read may take, None: any


class _Socket(io.RawIOBase):
    """A socket's file whose reads end when the time of the answer is over."""

    def __init__(self, sock: socket.socket, waits: _Waits) -> None:
        self._sock = sock
        # Not the socket: this one counts, so that the socket stays open until it is closed.
        self._file = sock.makefile("rb", buffering=0)
        self._waits = waits

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        """Raises TimeoutError."""
        waits = self._waits
        if waits.until is not None:
            remaining = waits.until - waits.clock.now()
            if remaining <= 0:
                raise TimeoutError("timed out: the answer has not ended")
            self._sock.settimeout(remaining if waits.silence is None else min(remaining, waits.silence))
        return self._file.readinto(buffer)

    def close(self) -> None:
        self._file.close()
        super().close()


class _Answer:
    """What http.client takes for a socket, to read an answer from."""

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
    """The connection class of a pool of connections, `kind`, with deadlines by this clock."""
    base = _TimedTls if issubclass(kind, HTTPSConnection) else _Timed
    return type(base.__name__, (base,), {"clock": clock})


def extend_deadline(connection: object, *, silence: float | None, seconds: float) -> None:
    """Gives an answer that has begun so many seconds from now, and each wait for bytes `silence` seconds."""
    if isinstance(connection, _Timed):
        connection.until = connection.clock.now() + seconds
        connection.silence = silence
