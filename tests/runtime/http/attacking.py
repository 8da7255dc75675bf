"""Clients that connect to a server and then send as little as possible."""

import contextlib
import itertools
import socket
import threading
from collections.abc import Iterator

# The texts are sent byte by byte; none is a complete handshake or a complete call.
HELLO = b"\x16\x03\x01\x40\x00\x01\x00\x3f\xfc\x03\x03" + b"0" * 16_000
HEAD = b"POST /echo HTTP/1.1\r\nX: " + b"x" * 16_000
BODY = b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n"


def sources() -> Iterator[str]:
    """The addresses from which the clients connect, all of this machine."""
    return (f"127.1.{high}.{low}" for high in itertools.cycle(range(250)) for low in range(1, 250))


@contextlib.contextmanager
def trickling(port: int, connections: int, *texts: bytes) -> Iterator[None]:
    """Opens connections from several addresses. Each sends one of `texts` at ten bytes a second and then nothing more,
    and connects again when the server closes it. They are open when the block begins, and continue until it ends.
    """
    over, begun = threading.Event(), threading.Event()
    froms, lines = sources(), [_Line(text) for text in itertools.islice(itertools.cycle(texts), connections)]

    def trickle() -> None:
        while not over.wait(0.1):
            for line in lines:
                line.step(port, next(froms))
            begun.set()

    thread = threading.Thread(target=trickle)
    thread.start()
    try:
        assert begun.wait(60)
        yield
    finally:
        over.set()
        thread.join()
        for line in lines:
            line.close()


class _Line:
    def __init__(self, text: bytes) -> None:
        self._text = text
        self._sock: socket.socket | None = None

    def step(self, port: int, source: str) -> None:
        try:
            if self._sock is None:
                self._sock = socket.create_connection(("127.0.0.1", port), 60, source_address=(source, 0))
                self._sock.setblocking(False)
                self._unsent = iter(self._text)
            for byte in itertools.islice(self._unsent, 1):
                self._sock.send(bytes([byte]))
            if not self._sock.recv(1):
                self.close()
        except BlockingIOError:
            pass
        except OSError:
            self.close()

    def close(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None
