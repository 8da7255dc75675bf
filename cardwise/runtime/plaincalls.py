"""Plain calls: a POST as Go's clients send it, read and answered without gunicorn's parser and response.

gunicorn costs 0.2 ms of CPU a call, more than most of our answers (docs/measured.md); nearly all of it goes to what
kube-scheduler and the API server never send: chunked bodies, proxies' headers, upgrades, trailers. So what is plain in
every respect is read here, and whatever is not goes to gunicorn with the bytes that have been read. What is plain is
said by one pattern that is stricter than HTTP: a call that two readers might understand differently is never ours.
"""

import io
import re
import socket
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from email.utils import formatdate
from http import HTTPStatus
from typing import Any

Environ = dict[str, Any]
WsgiApp = Callable[[Environ, Callable[..., Any]], Iterable[bytes]]

_FIRST = 65_536  # bytes read at once: the head, and of a smaller call the body too
_MOST = 4 << 20  # bytes of a body that is held whole before the application has said whether it wants it

# Field names in their usual form, values that are visible ASCII, no folded lines and no bare line ends.
_HEAD = re.compile(
    rb"POST (/[A-Za-z0-9/_.-]*)(?:\?([A-Za-z0-9&=_.-]*))? HTTP/1\.1\r\n"
    rb"((?:[A-Za-z0-9-]+: [!-~](?:[ -~]*[!-~])?\r\n)+)\r\n"
)
# What changes how a message is read, or what its connection is for.
_UNUSUAL = frozenset(
    {"TRANSFER_ENCODING", "CONNECTION", "UPGRADE", "EXPECT", "TE", "TRAILER", "KEEP_ALIVE", "PROXY_CONNECTION"}
)


@dataclass(frozen=True, slots=True)
class Call:
    """`environ` is WSGI's, with the whole body; `rest` is what came behind it."""

    environ: Environ
    rest: bytes = b""


@dataclass(slots=True)
class Answer:
    """What the application says through `start_response`. `close`: the connection ends with this answer."""

    status: str = ""
    headers: list[tuple[str, str]] = field(default_factory=list)
    close: bool = False

    def start_response(self, status: str, headers: list[tuple[str, str]], exc_info: object = None) -> None:
        del exc_info  # nothing is sent before the application is done, so it may always begin anew
        self.status, self.headers = status, headers

    def force_close(self) -> None:
        self.close = True

    def encoded(self, body: bytes) -> bytes:
        """As it is sent."""
        lines = [f"HTTP/1.1 {self.status}", f"Date: {formatdate(usegmt=True)}"]
        lines += [f"{name}: {value}" for name, value in self.headers]
        if not any(name.lower() == "content-length" for name, _ in self.headers):
            lines.append(f"Content-Length: {len(body)}")
        if self.close:
            lines.append("Connection: close")
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def read(sock: socket.socket, client: tuple[str, int], server: tuple[str, int], scheme: str) -> Call | bytes:
    """The next call; where it is not plain, the bytes that it begins with, none when the client has closed.

    `sock` blocks with a time limit. Raises OSError.
    """
    data = sock.recv(_FIRST)
    found = _HEAD.match(data)
    environ = _environ(found) if found is not None else None
    if found is None or environ is None:
        return data
    length, begins = int(environ["CONTENT_LENGTH"]), found.end()
    environ |= {
        "wsgi.input": io.BytesIO(_body(sock, data[begins : begins + length], length)),
        "wsgi.url_scheme": scheme,
        "REMOTE_ADDR": client[0],
        "REMOTE_PORT": str(client[1]),
        "SERVER_NAME": server[0],
        "SERVER_PORT": str(server[1]),
    }
    return Call(environ, data[begins + length :])


def refusal() -> bytes:
    """To a call that the application failed on."""
    status = HTTPStatus.INTERNAL_SERVER_ERROR
    return Answer(f"{status.value} {status.phrase}", close=True).encoded(b"")


def _environ(head: "re.Match[bytes]") -> Environ | None:
    """Of the request line and the headers; None where one of them makes the call unusual."""
    environ: Environ = {}
    for line in head[3].decode("ascii").split("\r\n")[:-1]:
        name, _, value = line.partition(": ")
        key = name.upper().replace("-", "_")
        if key in _UNUSUAL or f"HTTP_{key}" in environ:
            return None
        environ[f"HTTP_{key}"] = value
    length = environ.pop("HTTP_CONTENT_LENGTH", "")
    if "HTTP_HOST" not in environ or not length.isdigit() or len(length) > len(str(_MOST)) or int(length) > _MOST:
        return None
    environ |= {
        "REQUEST_METHOD": "POST",
        "SCRIPT_NAME": "",
        "PATH_INFO": head[1].decode("ascii"),
        "QUERY_STRING": (head[2] or b"").decode("ascii"),
        "SERVER_PROTOCOL": "HTTP/1.1",
        "CONTENT_LENGTH": length,
        "wsgi.version": (1, 0),
        "wsgi.errors": sys.stderr,
        "wsgi.input_terminated": True,
        "wsgi.multithread": True,
        "wsgi.multiprocess": False,
        "wsgi.run_once": False,
    }
    if "HTTP_CONTENT_TYPE" in environ:
        environ["CONTENT_TYPE"] = environ.pop("HTTP_CONTENT_TYPE")
    return environ


def _body(sock: socket.socket, begun: bytes, length: int) -> bytes:
    if len(begun) == length:
        return begun
    body = bytearray(length)
    body[: len(begun)] = begun
    got, view = len(begun), memoryview(body)
    while got < length:
        more = sock.recv_into(view[got:])
        if not more:
            raise ConnectionResetError("the client closed in the middle of a call")
        got += more
    return bytes(body)
