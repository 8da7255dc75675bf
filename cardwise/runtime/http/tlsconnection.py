"""TLS on a socket that never blocks, in which OpenSSL never reads from the network by itself.

A record of TLS need not carry data: TLS 1.3 lets a peer change its keys as often as it likes (RFC 8446, section 4.6.3),
and OpenSSL goes on reading as long as such records come. Here it is fed with a bounded number of bytes at a time, and a
peer that sends many bytes without any data is gone.
"""

import contextlib
import socket
import ssl
from typing import Final

_FEED: Final = 32_768  # bytes: some milliseconds of work, if they are the shortest records that there are
_BARREN: Final = 65_536  # bytes without data between them, a client's chain of certificates included
_CHUNK: Final = 16_384  # of what is sent: a record of TLS


class TlsConnection:
    """The server's side. What `ssl.SSLSocket` has of these methods does the same there, but for what is said here."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext) -> None:
        self._sock = sock
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._unsent = memoryview(b"")  # records
        self._stands_for = 0  # so many bytes of data that `send` was given are in them
        self._barren = 0

    def fileno(self) -> int:
        return self._sock.fileno()

    def getpeercert(self) -> bytes | None:
        return self._tls.getpeercert(binary_form=True)

    def do_handshake(self) -> None:
        """Raises SSLWantReadError and SSLWantWriteError. When it has ended, `recv` may have data at once."""
        if not self._incoming.pending:
            self._feed()
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            if not self._flush():
                raise ssl.SSLWantWriteError from None
            raise
        except ssl.SSLError:
            self._flush()  # the alert says why
            raise
        if not self._flush():
            raise ssl.SSLWantWriteError
        self._barren = 0

    def recv(self) -> bytes:
        """All data of what has come. b"" says that the peer is gone. Raises SSLWantReadError where there is none."""
        if not self._incoming.pending:
            self._feed()
        data = bytearray()
        try:
            while chunk := self._tls.read(_FEED):
                data += chunk
        except ssl.SSLWantReadError:
            self._flush()  # as a change of keys that the peer asks us for
            if not data:
                raise
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            pass
        if data:
            self._barren = 0
        return bytes(data)

    @property
    def has_pending_data(self) -> bool:
        """Whether something has come with the end of the handshake, of which the socket tells no more."""
        return bool(self._incoming.pending)

    def send(self, data: memoryview) -> int:
        """How many bytes of `data` are with the kernel. Where that is none yet, it raises SSLWantWriteError, and wants
        the same bytes again.
        """
        if not self._stands_for:
            self._stands_for = self._tls.write(data[:_CHUNK])
        if not self._flush():
            raise ssl.SSLWantWriteError
        sent, self._stands_for = self._stands_for, 0
        return sent

    def unwrap(self) -> None:
        """Says that nothing more comes, and waits for no answer."""
        with contextlib.suppress(ssl.SSLError):
            self._tls.unwrap()
        self._flush()

    def shutdown(self, how: int) -> None:
        self._sock.shutdown(how)

    def close(self) -> None:
        self._sock.close()

    def _feed(self) -> None:
        try:
            came = self._sock.recv(_FEED)
        except BlockingIOError:
            raise ssl.SSLWantReadError from None
        if not came:
            self._incoming.write_eof()
        self._barren += len(came)
        if self._barren > _BARREN:
            raise ConnectionAbortedError("nothing but records of TLS itself")
        self._incoming.write(came)

    def _flush(self) -> bool:
        """Whether all that was to be sent is with the kernel."""
        while True:
            if not self._unsent:
                self._unsent = memoryview(self._outgoing.read())
                if not self._unsent:
                    return True
            try:
                self._unsent = self._unsent[self._sock.send(self._unsent) :]
            except BlockingIOError:
                return False
