"""Parses HTTP/1.1 calls for WSGI, and encodes responses.

The parser is llhttp (httptools), the parser of Node.js. `Reader` also rejects what llhttp accepts beyond RFC 9112,
because other parsers might interpret such a call differently. The tests compare it with h11. Nothing here waits or does
I/O, so a call may arrive in pieces of any size.
"""

import io
import re
import select
import socket
import sys
from collections.abc import Callable, Iterable
from email.utils import formatdate
from http import HTTPStatus
from typing import Any, Final, NamedTuple, NoReturn
from urllib.parse import unquote_to_bytes

import httptools

# In the WSGI environ: the time when the first bytes of the call arrived, by the server's clock. The call may have
# waited for a thread since then.
ARRIVED_KEY: Final = "cardwise.arrived"
# In the WSGI environ: a function that makes the server close the connection after the response.
CLOSE_KEY: Final = "cardwise.close"
# In the WSGI environ, if the server has threads for calls that take long: the owner, if `move_long_call` has moved the
# call to these threads; else None.
LONG_OWNER_KEY: Final = "cardwise.long_owner"
# In the WSGI environ: whether the call may wait for minutes, because it runs on a thread of the slow address.
SLOW_KEY: Final = "cardwise.slow"
# In the WSGI environ: the socket of the connection, to check whether the client is still connected.
SOCKET_KEY: Final = "cardwise.socket"

Environ = dict[str, Any]
WsgiApp = Callable[[Environ, Callable[..., Any]], Iterable[bytes]]

# Maximum number of bytes of a request's target (path and query), and of the names and values of its headers. Heads of
# Cardwise's clients have less than 2 KiB. 8 KiB and 16 KiB are the defaults of nginx and of Node.js: proxies send no
# more.
_MAX_TARGET: Final = 8_192
_MAX_REQUEST_LINE: Final = _MAX_TARGET + 64
_MAX_HEADER_BYTES: Final = 16_384
# Maximum number of bytes of a call outside its body: the head and the chunk headers.
_MAX_CHUNK_OVERHEAD: Final = 65_536
_MAX_HEADERS: Final = 100  # maximum number of header lines, with equal or different names
# The only form of a request line that is accepted. llhttp also accepts several spaces, targets with a host or a
# fragment, and the versions 0.9 and 2.0. Empty lines before it are ignored (RFC 9112, section 2.2).
_REQUEST_LINE: Final = re.compile(rb"[\r\n]*[A-Z]+ /[!\x22\x24-~]* HTTP/1\.[01]\r\n")
# Headers that a request may have only once (RFC 9110, section 5.3 and RFC 9112, sections 3.2, 6.1 and 6.3): if a
# request had two of them, two parsers could use different ones.
_SINGLE_HEADERS: Final = frozenset({"HTTP_CONTENT_LENGTH", "HTTP_HOST", "HTTP_TRANSFER_ENCODING"})
# The interim response that a client may await before it sends the body (RFC 9110, section 10.1.1).
CONTINUE_RESPONSE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
# Estimated bytes of memory, including the overhead of Python objects: of a call's environ, and of each header line.
_CALL_BYTES: Final = 4_096
_LINE_BYTES: Final = 256
_IPV4_MAPPED: Final = bytes(10) + b"\xff\xff"  # the first bytes of an IPv4-mapped IPv6 address


class BadHttpCall(Exception):
    """An invalid call, with the status of the response. The rest of the connection cannot be parsed."""

    def __init__(self, status: HTTPStatus) -> None:
        super().__init__(status.phrase)
        self.status = status


class TakesLong(Exception):
    """The call must be answered by the threads for calls that take long.

    owner: the namespace or other owner of the call; owners share these threads fairly.
    """

    def __init__(self, owner: str) -> None:
        super().__init__(owner)
        self.owner = owner


class HttpCall(NamedTuple):
    """A complete call.

    environ: the WSGI environ. PATH_INFO still has percent escapes, which `answer_call` decodes.
    held_bytes: the estimated bytes of memory that the call takes.
    last: whether the connection ends after the response to this call.
    """

    environ: Environ
    held_bytes: int
    last: bool


class Reader:
    """Parses the calls of one connection, one at a time.

    If a client sends more bytes before the response to its call, these bytes are ignored, and the connection ends after
    the response. HTTP/1.1 lets a client do so (pipelining), but Cardwise's clients do not.

    shared: the part of the environ that is the same for all calls.
    max_body_bytes: maximum number of bytes of a body. A larger body is not read: the call has an empty input, and as
        CONTENT_LENGTH the announced size or the bytes received so far. It is the last call of the connection.
    """

    def __init__(self, shared: Environ, max_body_bytes: int) -> None:
        self.call: HttpCall | None = None  # the complete call; set it to None once it is answered
        self.has_begun = False  # whether a call has begun to arrive
        self.awaits_continue = False  # whether the client waits for CONTINUE before it sends the body
        self._shared = shared
        self._max_body_bytes = max_body_bytes
        self._headers: Environ = {}  # the headers of the call whose head is complete
        self._parser = httptools.HttpRequestParser(self)
        self._reset()

    @property
    def held_bytes(self) -> int:
        """The estimated bytes of memory of the call, complete or not."""
        if self.call is not None:
            return self.call.held_bytes
        return self._head_bytes() + self._head + sys.getsizeof(self._body) if self.has_begun else 0

    def _head_bytes(self) -> int:
        """The estimated bytes of the environ of the call that is being read."""
        return _CALL_BYTES + self._header_lines * _LINE_BYTES + self._header_bytes + len(self._url) + len(self._begin)

    def close(self) -> None:
        """Stop parsing. Breaks the reference cycle with the parser, which would wait for the garbage collector."""
        del self._parser

    def feed(self, data: bytes) -> None:
        """Parse the next bytes of the connection, while there is no complete call. Raises BadHttpCall."""
        body = len(self._body)
        if not self._past_headers:
            self._begin += data[: _MAX_REQUEST_LINE - len(self._begin)]
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if self.call is None:
                # If a callback below has raised an exception, it is the context of llhttp's exception.
                cause = error.__context__
                raise (cause if isinstance(cause, BadHttpCall) else BadHttpCall(HTTPStatus.BAD_REQUEST)) from error
            self.call = self.call._replace(last=True)
        if self.call is None:
            self.has_begun = True  # an empty line also begins a call, so that its time limit counts
            # All bytes outside the body: the head and the chunk headers.
            self._head += len(data) - (len(self._body) - body)
            if self._head > _MAX_CHUNK_OVERHEAD:
                raise BadHttpCall(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)

    # Callbacks of llhttp.

    def on_message_begin(self) -> None:
        if self.call is not None:
            raise BadHttpCall(HTTPStatus.BAD_REQUEST)  # ends the parsing

    def on_url(self, url: bytes) -> None:
        self._url += url
        if len(self._url) > _MAX_TARGET:
            raise BadHttpCall(HTTPStatus.REQUEST_URI_TOO_LONG)

    def on_header(self, name: bytes, content: bytes) -> None:
        if self._past_headers:
            raise BadHttpCall(HTTPStatus.BAD_REQUEST)  # a trailer, which Cardwise's clients never send
        self._header_lines += 1
        self._header_bytes += len(name) + len(content)
        if self._header_lines > _MAX_HEADERS or self._header_bytes > _MAX_HEADER_BYTES:
            raise BadHttpCall(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        if b"_" in name:
            return  # drop the header: in the environ its name would equal that of a header with "-"
        key = "HTTP_" + name.decode("latin-1").upper().replace("-", "_")
        contents = self._header_contents.setdefault(key, [])
        if contents and key in _SINGLE_HEADERS:
            raise BadHttpCall(HTTPStatus.BAD_REQUEST)
        contents.append(content.strip(b" \t").decode("latin-1"))

    def on_headers_complete(self) -> None:
        self._past_headers = True
        line = _REQUEST_LINE.match(self._begin)
        self._begin.clear()
        if line is None:
            raise BadHttpCall(HTTPStatus.BAD_REQUEST)
        self._headers = {key: ",".join(contents) for key, contents in self._header_contents.items()}
        version = self._parser.get_http_version()
        if "HTTP_HOST" not in self._headers and version == "1.1":
            raise BadHttpCall(HTTPStatus.BAD_REQUEST)
        coding = self._headers.get("HTTP_TRANSFER_ENCODING")
        if coding is not None and coding.lower() != "chunked":
            raise BadHttpCall(HTTPStatus.NOT_IMPLEMENTED)  # such as `gzip, chunked`, since bodies are not decompressed
        length = int(self._headers.pop("HTTP_CONTENT_LENGTH", "0"))
        if self._parser.should_upgrade() and (length or coding is not None):
            raise BadHttpCall(HTTPStatus.BAD_REQUEST)  # httptools does not read this body
        if length > self._max_body_bytes:
            self._reject_body(length)
        expected = self._headers.get("HTTP_EXPECT", "").lower() == "100-continue"
        self.awaits_continue = expected and version != "1.0"

    def on_body(self, body: bytes) -> None:
        self.awaits_continue = False
        self._body += body
        if len(self._body) > self._max_body_bytes:
            self._reject_body(len(self._body))

    def on_message_complete(self) -> None:
        # An upgrade to another protocol is not supported: the call is answered as an ordinary call.
        parser = self._parser
        goes_on = parser.should_keep_alive() and not parser.should_upgrade() and parser.get_http_version() == "1.1"
        self._finish_call(len(self._body), last=not goes_on)

    def _reject_body(self, length: int) -> NoReturn:
        self._body.clear()
        self._finish_call(length, last=True)
        raise BadHttpCall(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)  # ends the parsing; the application answers the call

    def _finish_call(self, length: int, *, last: bool) -> None:
        path, _, query = self._url.partition(b"?")
        environ = self._shared | self._headers
        environ["REQUEST_METHOD"] = self._parser.get_method().decode("ascii")
        # The answering thread decodes the path. Some paths take milliseconds, and this thread reads all connections.
        environ["PATH_INFO"] = path.decode("latin-1")
        environ["QUERY_STRING"] = query.decode("latin-1")
        environ["CONTENT_LENGTH"] = str(length)
        environ["wsgi.input"] = io.BytesIO(bytes(self._body))  # `read` of BytesIO returns these bytes without a copy
        if "HTTP_CONTENT_TYPE" in environ:
            environ["CONTENT_TYPE"] = environ.pop("HTTP_CONTENT_TYPE")
        self.call = HttpCall(environ, self._head_bytes() + len(self._body), last)
        self._reset()

    def _reset(self) -> None:
        """Prepare for the next call."""
        self.has_begun = False
        self.awaits_continue = False
        self._begin = bytearray()  # the first bytes of the call, with the request line
        self._url = b""
        self._header_lines = self._header_bytes = 0
        self._header_contents: dict[str, list[str]] = {}
        self._headers = {}
        self._body = bytearray()
        self._head = 0
        self._past_headers = False


def client_network(address: str) -> str:
    """The key of a client in limits: an IPv4 address itself; the /64 network of an IPv6 address.

    One IPv6 host may have all 2^64 addresses of its network. An IPv4-mapped address (`::ffff:10.1.2.3`), which a socket
    for both families shows for IPv4 clients, counts as the IPv4 address.
    """
    if ":" not in address:
        return address
    packed = socket.inet_pton(socket.AF_INET6, address.partition("%")[0])
    if packed.startswith(_IPV4_MAPPED):
        return socket.inet_ntop(socket.AF_INET, packed[len(_IPV4_MAPPED) :])
    return socket.inet_ntop(socket.AF_INET6, packed[:8] + bytes(8)) + "/64"


def shared_environ(client: tuple[Any, ...], server: tuple[Any, ...], scheme: str) -> Environ:
    """The part of the WSGI environ that is the same for all calls of a connection."""
    return {
        "SCRIPT_NAME": "",
        "SERVER_PROTOCOL": "HTTP/1.1",
        "SERVER_NAME": str(server[0]),
        "SERVER_PORT": str(server[1]),
        "REMOTE_ADDR": str(client[0]),
        "REMOTE_PORT": str(client[1]),
        "wsgi.version": (1, 0),
        "wsgi.url_scheme": scheme,
        "wsgi.errors": sys.stderr,
        "wsgi.input_terminated": True,
        "wsgi.multithread": True,
        "wsgi.multiprocess": False,
        "wsgi.run_once": False,
    }


def move_long_call(environ: Environ, owner: str) -> None:
    """Move the running call to the server's threads for calls that take long: the application is called again there.

    Raises TakesLong, which the application must not catch. Does nothing if the call already runs on these threads, or
    if the server lacks them.
    """
    if environ.get(LONG_OWNER_KEY, "") is None:
        raise TakesLong(owner)


def is_abandoned(environ: Environ) -> bool:
    """Whether the client of the running call has closed its connection. Returns at once."""
    connection = environ.get(SOCKET_KEY)
    if connection is None:
        return False
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    return bool(poll.poll(0))


class HttpResponse:
    """The application's response to a call. `last`: whether the connection ends after the response."""

    __slots__ = ("_headers", "_status", "last")

    def __init__(self, *, last: bool) -> None:
        self.last = last
        self._status = ""
        self._headers: list[tuple[str, str]] = []

    def start_response(self, status: str, headers: list[tuple[str, str]], exc_info: object = None) -> None:
        del exc_info  # nothing is sent before the application returns, so it may always replace its status and headers
        self._status, self._headers = status, headers

    def force_close(self) -> None:
        self.last = True

    def encode(self, body: bytes, *, head_only: bool = False) -> bytes:
        """The response as bytes."""
        lines = [f"HTTP/1.1 {self._status}", f"Date: {formatdate(usegmt=True)}"]
        lines += [f"{name}: {content}" for name, content in self._headers]
        if not any(name.lower() == "content-length" for name, _ in self._headers):
            lines.append(f"Content-Length: {len(body)}")
        if self.last:
            lines.append("Connection: close")
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + (b"" if head_only else body)


class Answer(NamedTuple):
    """The response to a call as bytes, and whether the server closes the connection after it."""

    response: bytes
    closes_connection: bool


def answer_call(app: WsgiApp, call: HttpCall, stopping: Callable[[], bool]) -> Answer:
    """Call the application, and encode its response.

    stopping: returns whether the server stops; then the connection is closed after the response.

    Raises the exceptions of `app`. After TakesLong the same call can be answered again.
    """
    if "%" in call.environ["PATH_INFO"]:
        path = call.environ["PATH_INFO"].encode("latin-1")
        call.environ["PATH_INFO"] = unquote_to_bytes(path).decode("latin-1")
    response = HttpResponse(last=call.last)
    call.environ[CLOSE_KEY] = response.force_close
    try:
        parts = app(call.environ, response.start_response)
    except TakesLong as error:
        call.environ[LONG_OWNER_KEY] = error.owner
        call.environ["wsgi.input"].seek(0)
        raise
    try:
        body = b"".join(parts)
    finally:
        if (close := getattr(parts, "close", None)) is not None:
            close()
    if stopping():
        response.force_close()
    return Answer(response.encode(body, head_only=call.environ["REQUEST_METHOD"] == "HEAD"), response.last)


def refusal_response(status: HTTPStatus) -> bytes:
    """A response by the server itself. The connection is closed after it."""
    response = HttpResponse(last=True)
    response.start_response(f"{status.value} {status.phrase}", [])
    return response.encode(b"")
