"""TLS on a non-blocking socket, where OpenSSL does not read from the network itself.

TLS records may have no data: In TLS 1.3 a peer may change its keys without limit (RFC 8446, section 4.6.3), and OpenSSL
continues to read while such records arrive. So this class passes a limited number of bytes to OpenSSL at a time. It
closes the connection of a peer that sends many bytes without data.
"""

import contextlib
import socket
import ssl
from typing import Final

# Maximum number of bytes that OpenSSL gets at a time: a few milliseconds of work in the worst case.
_FEED_BYTES: Final = 32_768
# Maximum number of received bytes without data, including a client's certificate chain.
_MAX_UNPRODUCTIVE: Final = 65_536
_CHUNK_BYTES: Final = 16_384  # maximum number of bytes that are sent in one TLS record


class TlsConnection:
    """The server side of a TLS connection. Methods work as in `ssl.SSLSocket`, except where their docstrings differ."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext) -> None:
        self._sock = sock
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._unsent = memoryview(b"")  # TLS records that the kernel has not accepted yet
        self._retried_data = 0  # the number of data bytes of `send` in these records
        self._unproductive = 0

    def fileno(self) -> int:
        return self._sock.fileno()

    def getpeercert(self) -> bytes | None:
        return self._tls.getpeercert(binary_form=True)

    def do_handshake(self) -> None:
        """Continue the handshake. Raises SSLWantReadError or SSLWantWriteError until it is done.

        Afterwards `recv` may have data at once.
        """
        if not self._incoming.pending:
            self._feed_openssl()
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            if not self._send_to_kernel():
                raise ssl.SSLWantWriteError from None
            raise
        except ssl.SSLError:
            self._send_to_kernel()  # sends the alert with the reason
            raise
        if not self._send_to_kernel():
            raise ssl.SSLWantWriteError
        self._unproductive = 0

    def recv(self) -> bytes:
        """All received data; b"" if the peer has closed the connection. Raises SSLWantReadError if there is no data."""
        if not self._incoming.pending:
            self._feed_openssl()
        data = bytearray()
        try:
            while chunk := self._tls.read(_FEED_BYTES):
                data += chunk
        except ssl.SSLWantReadError:
            self._send_to_kernel()  # for example a key update that the peer requests
            if not data:
                raise
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            pass
        if data:
            self._unproductive = 0
        return bytes(data)

    @property
    def has_pending_data(self) -> bool:
        """Whether bytes arrived together with the end of the handshake, which polling the socket does not show."""
        return bool(self._incoming.pending)

    def send(self, data: memoryview) -> int:
        """Send data. Returns the number of bytes that the kernel has accepted. Raises SSLWantWriteError if it has
        accepted none; then the caller must call again with the same bytes.
        """
        if not self._retried_data:
            self._retried_data = self._tls.write(data[:_CHUNK_BYTES])
        if not self._send_to_kernel():
            raise ssl.SSLWantWriteError
        sent, self._retried_data = self._retried_data, 0
        return sent

    def unwrap(self) -> None:
        """Send the TLS close notification, without waiting for the notification of the peer."""
        with contextlib.suppress(ssl.SSLError):
            self._tls.unwrap()
        self._send_to_kernel()

    def shutdown(self, how: int) -> None:
        self._sock.shutdown(how)

    def close(self) -> None:
        self._sock.close()

    def _feed_openssl(self) -> None:
        try:
            received = self._sock.recv(_FEED_BYTES)
        except BlockingIOError:
            raise ssl.SSLWantReadError from None
        if not received:
            self._incoming.write_eof()
        self._unproductive += len(received)
        if self._unproductive > _MAX_UNPRODUCTIVE:
            raise ConnectionAbortedError("the peer sends TLS records without data")
        self._incoming.write(received)

    def _send_to_kernel(self) -> bool:
        """Send pending records. Returns whether the kernel has accepted all of them."""
        while True:
            if not self._unsent:
                self._unsent = memoryview(self._outgoing.read())
                if not self._unsent:
                    return True
            try:
                self._unsent = self._unsent[self._sock.send(self._unsent) :]
            except BlockingIOError:
                return False
