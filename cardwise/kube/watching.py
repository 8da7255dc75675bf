"""A watch request in progress. It delivers lines for minutes. Another thread can end the request, for example at
shutdown.
"""

import contextlib
from collections.abc import Generator

import urllib3
from urllib3.exceptions import HTTPError, ReadTimeoutError

from cardwise.kube import errors

_READ_BYTES = 65536  # bytes of one read
_MAX_BYTES = 64 << 20  # bytes of one event, as in `client.MAX_BYTES`


class Watch:
    """The raw lines of a watch's events. Only one thread may iterate, once; any thread may call `close`."""

    def __init__(self, response: urllib3.BaseHTTPResponse, path: str, read_timeout: float | None) -> None:
        self._response = response
        self._path = path
        self._closed = False
        connection = getattr(response, "connection", None)
        if connection is not None and connection.sock is not None:
            connection.sock.settimeout(read_timeout)

    def __iter__(self) -> Generator[bytes]:
        """Yield lines until the server ends the watch or `close` is called.

        Raises `errors.WatchSilent` if no byte arrived within the read timeout, `errors.TooLarge` for an event that is
        larger than any object, `errors.Unreachable` if the connection breaks.
        """
        rest = bytearray()  # the beginning of an incomplete line; it grows without being copied for each chunk
        try:
            for chunk in self._response.stream(_READ_BYTES, decode_content=False):
                head, newline, tail = chunk.rpartition(b"\n")
                if newline:
                    yield from (line for line in (bytes(rest) + head).split(b"\n") if line)
                    rest.clear()
                rest += tail
                if len(rest) > _MAX_BYTES:
                    raise errors.TooLarge(f"watch of {self._path}: an event has more than {_MAX_BYTES} bytes")
        except (ReadTimeoutError, TimeoutError) as error:
            if not self._closed:
                raise errors.WatchSilent(f"watch of {self._path}: {error}") from error
        except (HTTPError, OSError, ValueError) as error:
            # http.client raises ValueError if `close` has shut the connection.
            if not self._closed:
                raise errors.Unreachable(f"watch of {self._path}: {error}") from error
        finally:
            # The connection cannot be reused, because the response was not read to its end.
            with contextlib.suppress(HTTPError, OSError):
                self._response.close()

    def close(self) -> None:
        """End the iteration at once, even while it waits for bytes."""
        self._closed = True
        # Not `close()`: if the descriptor were closed while another thread reads it, its number could be reused.
        with contextlib.suppress(HTTPError, OSError, ValueError, RuntimeError):
            self._response.shutdown()
