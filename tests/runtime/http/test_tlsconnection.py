"""The limits of `TlsConnection` that OpenSSL does not have. test_httpserver and test_serving test the rest."""

import socket
import ssl
from collections.abc import Iterator

import pytest

from cardwise.runtime.http.tlsconnection import TlsConnection


class KeysAgain:
    """A replacement for OpenSSL that only receives records without data."""

    def __init__(self, incoming: ssl.MemoryBIO) -> None:
        self._incoming = incoming

    def read(self, max_bytes: int) -> bytes:
        self._incoming.read()
        raise ssl.SSLWantReadError

    do_handshake = read

    def wrap_bio(self, incoming, outgoing, *, server_side):
        return type(self)(incoming)


@pytest.fixture
def socket_ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    with ours, theirs:
        yield ours, theirs


def test_records_without_data_are_limited(socket_ends):
    ours, theirs = socket_ends
    line = TlsConnection(ours, KeysAgain(ssl.MemoryBIO()))
    for _ in range(3):
        theirs.sendall(b"x" * 20_000)
        with pytest.raises(ssl.SSLWantReadError):
            line.recv()
    theirs.sendall(b"x" * 20_000)
    with pytest.raises(ConnectionAbortedError):
        line.recv()
