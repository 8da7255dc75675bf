"""A client of the API server with keep-alive connections; requests and responses are bytes and dicts.

The official generated client takes fifty times as long to decode a pod (docs/design/0014-libraries.md), and bind must
be fast. `credentials` finds the address, TLS settings and token. The client never retries, because only the caller
knows which calls may be repeated.
"""

import contextlib
import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from pathlib import Path
from typing import Any, Literal, Self, TypeVar
from urllib.parse import urlencode, urlsplit

import msgspec
import urllib3
from urllib3.connection import HTTPConnection
from urllib3.connectionpool import HTTPConnectionPool
from urllib3.exceptions import HTTPError, ReadTimeoutError

from cardwise.clock import SYSTEM, Clock
from cardwise.kube import credentials, errors, transport, wire
from cardwise.kube.credentials import Authorization
from cardwise.kube.nesting import null_deep_values, tolerate_depth
from cardwise.kube.recovery import Recovery
from cardwise.kube.watching import Watch

JSON_CONTENT_TYPE = "application/json"
CONNECT_TIMEOUT = 5.0  # seconds
MAX_BYTES = 64 << 20  # bytes of a response, such as one page of a list; an object has at most a few MiB
MAX_UNPAGED_LIST_BYTES = 2 << 30  # bytes of a whole list in one response; 60,000 pods of 10 KiB are 600 MiB

PatchKind = Literal["merge", "strategic", "json"]
PATCH_TYPES: dict[PatchKind, str] = {
    "merge": "application/merge-patch+json",
    "strategic": "application/strategic-merge-patch+json",
    "json": "application/json-patch+json",
}

Query = Mapping[str, str]
_T = TypeVar("_T")

# Seconds for which a token is used before it is read again. In-cluster tokens are valid for an hour and are renewed
# well before that. Reading the file for every request would take longer than the rest of the client's work.
_TOKEN_SECONDS = 10.0
_READ_BYTES = 65_536  # bytes of one read of a response
# Seconds until the headers of a watch: the API server sends them at once, or after the request was in its queues.
_WATCH_HEADERS_SECONDS = 15.0
_WATCH_GRACE_SECONDS = 60.0  # seconds that a watch may last beyond the time at which the API server should end it
_MAX_ERROR_BYTES = 1 << 20  # bytes of an error response
_UNPAGED_TIMEOUT_FACTOR = 5  # a list in one response gets this many times the timeout of a page
_PAGE_SHRINK_FACTOR = 4  # divisor of the page limit after a page was too large
# Seconds; only credentials that take longer shorten the timeout, so that the object of the usual timeout is reused.
_SLOW_CREDENTIALS_SECONDS = 0.01

_CLOCK_ERRORS = ("certificate is not yet valid", "certificate has expired")  # OpenSSL's messages

_encode = msgspec.json.Encoder().encode
_decode = null_deep_values(msgspec.json.Decoder().decode)
_decode_list_head = tolerate_depth(msgspec.json.Decoder(wire.ListHead).decode)
_decode_list_begin = msgspec.json.Decoder(wire.ListBegin).decode
# Bytes at the beginning of a list in which its metadata is searched; a continue token has some hundred bytes.
_LIST_HEAD_BYTES = 2048


class KubeClient:
    """A client of one API server. Thread-safe; can be used after a fork (the child opens its own connections).

    All methods raise `errors.KubeError` for error responses. Two subclasses stand for missing responses: `TimedOut` if
    the time limit has passed, else `Unreachable`. Nothing that the server does raises another exception. Single objects
    are returned without `metadata.managedFields` (`wire.drop_managed_fields`). Parameters of several methods:

    timeout: seconds for the whole response; None for no limit.
    max_bytes: the maximum size of the response. For a larger one `errors.TooLarge` is raised, and the rest is not read.
    """

    def __init__(
        self,
        host: str,
        *,
        ssl_context: ssl.SSLContext | None = None,
        server_hostname: str | None = None,
        authorization: Authorization | None = None,
        proxy: str | None = None,
        pool_size: int = 16,
        user_agent: str = "cardwise",
        clock: Clock = SYSTEM,
    ) -> None:
        """Create a client.

        host: the URL of the API server.
        authorization: returns the header value, such as "Bearer x"; may be slow.
        """
        self.host = host
        self.namespace = credentials.DEFAULT_NAMESPACE  # for callers that name none, as in kubectl
        self.recovery = Recovery()
        self._ssl_context = ssl_context
        self._server_hostname = server_hostname
        self._authorization = authorization
        self._proxy = proxy
        self._clock = clock
        self._pool_size = pool_size
        self._prefix = urlsplit(host).path.rstrip("/")
        # Headers by content type. The headers for "" are those of a request without a body; the others extend them.
        self._headers: dict[str, dict[str, str]] = {"": {"Accept": JSON_CONTENT_TYPE, "User-Agent": user_agent}}
        self._headers_until = 0.0
        self._lock = threading.Lock()
        self._timeouts: dict[float | None, urllib3.Timeout] = {}
        # The Date header of the last response, and when it arrived, in seconds of the clock.
        self._last_date: tuple[str | None, float] = (None, 0.0)
        self._pid = os.getpid()
        self._manager, self._pool = self._connect()

    @classmethod
    def load(
        cls, kubeconfig: Path | None = None, *, context: str = "", pool_size: int = 16, user_agent: str = "cardwise"
    ) -> Self:
        """Create a client from the given kubeconfig, else the pod's service account, else $KUBECONFIG or
        ~/.kube/config. Raises `errors.KubeConfigError`, which names the sources that were tried.

        context: a context of the kubeconfig; "" for its current context. With a context, the service account is not
            used.
        """
        loaded = credentials.load(kubeconfig, context)
        client = cls(
            loaded.host,
            ssl_context=loaded.ssl_context,
            server_hostname=loaded.server_hostname,
            authorization=loaded.authorization,
            proxy=loaded.proxy,
            pool_size=pool_size,
            user_agent=user_agent,
        )
        client.namespace = loaded.namespace
        return client

    def request(
        self,
        method: str,
        path: str,
        *,
        body: object | None = None,
        query: Query | None = None,
        content_type: str = JSON_CONTENT_TYPE,
        timeout: float | None = 10.0,
        max_bytes: int = MAX_BYTES,
    ) -> bytes:
        """Send a request and return the body of the response.

        body: bytes are sent unchanged; other values are encoded as JSON.
        """
        if body is not None and not isinstance(body, bytes):
            body = _encode(body)
        response = self._open_response(method, path, body=body, query=query, content_type=content_type, timeout=timeout)
        return _read_body(response, max_bytes, f"{method} {path}")

    def get(
        self,
        path: str,
        query: Query | None = None,
        *,
        timeout: float | None = 10.0,
        max_bytes: int = MAX_BYTES,
        managed_fields: bool = False,
    ) -> dict[str, Any]:
        """GET one object.

        managed_fields: keep `metadata.managedFields`.
        """
        body = self.request("GET", path, query=query, timeout=timeout, max_bytes=max_bytes)
        return _decode_object(body) if managed_fields else _without_managed_fields(body)

    def fetch_server_time(self) -> datetime | None:
        """Request the API server's time, to the second; None if its response has no date."""
        response = self._open_response("GET", "/version", timeout=10.0)
        _read_body(response, MAX_BYTES, "GET /version")
        return _parse_date(response.headers.get("Date"))

    def server_time(self) -> datetime:
        """The API server's time to the second, computed from its last response. If that response had no date, this
        machine's time.

        Use this for comparisons with times that the API server has written. Sends no request.
        """
        return self.last_server_time() or self._clock.wall()

    def last_server_time(self) -> datetime | None:
        """As `server_time`, but None if the API server's last response had no date."""
        date, received_at = self._last_date
        server = _parse_date(date)
        return None if server is None else server + timedelta(seconds=self._clock.now() - received_at)

    def create(
        self, path: str, body: object, *, query: Query | None = None, timeout: float | None = 10.0
    ) -> dict[str, Any]:
        """POST `body` to a collection (or to a subresource such as binding)."""
        return _without_managed_fields(self.request("POST", path, body=body, query=query, timeout=timeout))

    def update(
        self, path: str, body: object, *, query: Query | None = None, timeout: float | None = 10.0
    ) -> dict[str, Any]:
        """PUT `body`. If `body` has metadata.resourceVersion, raises `Conflict` if the object has another version."""
        return _without_managed_fields(self.request("PUT", path, body=body, query=query, timeout=timeout))

    def patch(
        self,
        path: str,
        body: object,
        kind: PatchKind = "merge",
        field_manager: str | None = None,
        *,
        query: Query | None = None,
        timeout: float | None = 10.0,
    ) -> dict[str, Any]:
        """PATCH the object with `body`, a patch of this kind."""
        query = dict(query or {})
        if field_manager is not None:
            query["fieldManager"] = field_manager
        content_type = PATCH_TYPES[kind]
        answer = self.request("PATCH", path, body=body, query=query, content_type=content_type, timeout=timeout)
        return _without_managed_fields(answer)

    def delete(
        self,
        path: str,
        body: object | None = None,
        *,
        query: Query | None = None,
        timeout: float | None = 10.0,
    ) -> dict[str, Any]:
        """DELETE the object. `body`: a DeleteOptions, for preconditions and grace period."""
        return _without_managed_fields(self.request("DELETE", path, body=body, query=query, timeout=timeout))

    def list_pages(
        self, path: str, query: Query | None = None, limit: int = 500, *, timeout: float | None = 60.0
    ) -> Iterator[bytes]:
        """Yield the pages of a consistent list (never from a stale cache); each page is a List object of the API.

        A page of more than `MAX_BYTES` is requested again with fewer objects. Raises `Gone` if the list expires between
        two pages; then list again from the start.

        limit: objects per page; 0 for all objects in one page, with five times the timeout.
        """
        params = dict(query or {})
        max_bytes = MAX_BYTES if limit else MAX_UNPAGED_LIST_BYTES
        if not limit and timeout is not None:
            timeout *= _UNPAGED_TIMEOUT_FACTOR
        while True:
            if limit:
                params["limit"] = str(limit)
            try:
                page = self.request("GET", path, query=params, timeout=timeout, max_bytes=max_bytes)
            except errors.TooLarge:
                if limit <= 1:
                    raise
                limit = max(1, limit // _PAGE_SHRINK_FACTOR)
                continue
            yield page
            try:
                token = _list_meta(page).continue_
            except msgspec.DecodeError as error:
                raise errors.Unreachable(f"GET {path}: not a List: {error}") from error
            if not token:
                return
            params["continue"] = token

    def list_as(
        self,
        path: str,
        kind: type[wire.ListOf[_T]],
        query: Query | None = None,
        limit: int = 500,
        *,
        timeout: float | None = 60.0,
    ) -> Iterator[_T]:
        """The objects of `list_pages`, decoded as the element type of `kind`. JSON of any depth is accepted."""
        decode = null_deep_values(msgspec.json.Decoder(kind).decode)
        for page in self.list_pages(path, query, limit, timeout=timeout):
            try:
                decoded = decode(page)
            except msgspec.DecodeError as error:
                raise errors.Unreachable(
                    f"GET {path}: not a list of this kind ({error}); is it the response of a proxy or a login page?"
                ) from error
            yield from decoded.items or ()

    def list_objects(self, path: str, query: Query | None = None) -> Iterator[dict[str, Any]]:
        """As `list_as`, with the objects as dicts."""
        return self.list_as(path, wire.ListOf[dict[str, Any]], query)

    def watch(
        self,
        path: str,
        query: Query | None = None,
        resource_version: str = "",
        timeout_seconds: float = 300.0,
        read_timeout: float | None = None,
    ) -> Watch:
        """Start a watch with bookmarks. Iterate over the watch for raw event lines (bytes). Any thread may end the
        watch with `close()`.

        Raises `Unreachable` if the connection breaks, or if the server does not end the watch in time.

        resource_version: events after this version are sent.
        timeout_seconds: the server ends the watch after this time, and the iteration stops.
        read_timeout: seconds without any line after which `Unreachable` is raised; None for `timeout_seconds` + 30.
        """
        params = dict(query or {})
        params |= {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": resource_version,
            "timeoutSeconds": str(max(1, int(timeout_seconds))),
        }
        if read_timeout is None:
            read_timeout = timeout_seconds + 30.0
        # Until the headers arrive, no other thread can end the wait, so this wait has a limit of its own.
        response = self._open_response("GET", path, query=params, timeout=min(_WATCH_HEADERS_SECONDS, read_timeout))
        seconds = max(timeout_seconds, read_timeout) + _WATCH_GRACE_SECONDS
        transport.extend_deadline(getattr(response, "connection", None), max_silence=read_timeout, seconds=seconds)
        return Watch(response, path, read_timeout)

    def close(self) -> None:
        """Close the idle connections. Requests in progress continue to their end."""
        self._manager.clear()

    def _open_response(
        self,
        method: str,
        path: str,
        *,
        body: bytes | None = None,
        query: Query | None = None,
        content_type: str = JSON_CONTENT_TYPE,
        timeout: float | None,
    ) -> urllib3.BaseHTTPResponse:
        """Send a request. Returns the response with its headers; its body is not read yet."""
        url = f"{self._prefix}{path}?{urlencode(query)}" if query else self._prefix + path
        began = self._clock.now()
        headers = self._request_headers(content_type if body is not None else "")
        if timeout is not None:
            # An exec plugin may be slow; its time counts towards the timeout.
            spent = self._clock.now() - began
            if spent >= timeout:
                raise errors.Unreachable(f"{method} {path}: the credentials took {spent:.1f} s, which left no time")
            if spent > _SLOW_CREDENTIALS_SECONDS:
                timeout -= spent
        try:
            response = self._connection_pool().urlopen(
                method,
                url,
                body=body,
                headers=headers,
                retries=False,
                redirect=False,
                assert_same_host=False,
                timeout=self._timeout(timeout),
                preload_content=False,
            )
        except (ReadTimeoutError, TimeoutError) as error:
            raise errors.TimedOut(f"{method} {path}: {error}") from error
        except (HTTPError, OSError) as error:
            raise errors.Unreachable(f"{method} {path}: {error}{self._clock_suffix(error)}") from error
        if date := response.headers.get("Date"):
            self._last_date = date, self._clock.now()
        if response.status >= HTTPStatus.MULTIPLE_CHOICES:
            raise self._failure(response, method, path)
        return response

    def _clock_suffix(self, error: Exception) -> str:
        """The hint to check this machine's clock if a certificate is not valid at this time, as the end of an error."""
        if not any(phrase in str(error) for phrase in _CLOCK_ERRORS):
            return ""
        return f"; check this machine's clock, which shows {self._clock.wall():%Y-%m-%dT%H:%M:%SZ}"

    def _failure(self, response: urllib3.BaseHTTPResponse, method: str, path: str) -> errors.KubeError:
        if response.status == HTTPStatus.UNAUTHORIZED:
            # The next request reads the token again, since the token may have been rotated early.
            self._headers_until = 0.0
        try:
            body = _read_body(response, _MAX_ERROR_BYTES, f"{method} {path}")
        except errors.TooLarge:
            body = b""
        except errors.Unreachable as error:
            return error
        return errors.from_response(response.status, body, response.headers)

    def _request_headers(self, content_type: str) -> dict[str, str]:
        if self._authorization is not None and self._clock.now() >= self._headers_until:
            self._renew_headers()
        table = self._headers  # read once, because a renewal in another thread replaces the dict
        headers = table.get(content_type)
        if headers is None:
            headers = table[content_type] = {**table[""], "Content-Type": content_type}
        return headers

    def _renew_headers(self) -> None:
        # One thread at a time, so that not all threads start an exec plugin at once.
        with self._lock:
            if self._authorization is None or self._clock.now() < self._headers_until:
                return
            authorization = self._authorization()
            if authorization and not credentials.is_header_value(authorization):
                raise errors.Unauthorized(401, "NoToken", f"the token {credentials.INVALID_HEADER_PROBLEM}")
            base = {key: text for key, text in self._headers[""].items() if key != "Authorization"}
            if authorization:
                base["Authorization"] = authorization.strip()
            if base != self._headers[""]:
                self._headers = {"": base}
            self._headers_until = self._clock.now() + _TOKEN_SECONDS

    def _timeout(self, seconds: float | None) -> urllib3.Timeout:
        timeout = self._timeouts.get(seconds)
        if timeout is None:
            if len(self._timeouts) > 64:  # timeouts of watches have jitter, so there are many different ones
                self._timeouts.clear()
            # `total`, because callers rely on a write having ended when its timeout is over.
            timeout = urllib3.Timeout(connect=CONNECT_TIMEOUT, read=seconds, total=seconds)
            self._timeouts[seconds] = timeout
        return timeout

    def _connect(self) -> tuple[urllib3.PoolManager, HTTPConnectionPool]:
        options: dict[str, Any] = {"maxsize": self._pool_size, "socket_options": _socket_options()}
        if self._ssl_context is not None:
            options["ssl_context"] = self._ssl_context
            if self._server_hostname:
                options["server_hostname"] = self._server_hostname
                options["assert_hostname"] = self._server_hostname
            elif not self._ssl_context.check_hostname:
                options["assert_hostname"] = False
                options["cert_reqs"] = "CERT_NONE"
        manager: urllib3.PoolManager
        manager = urllib3.ProxyManager(self._proxy, **options) if self._proxy else urllib3.PoolManager(**options)
        pool = manager.connection_from_url(self.host)
        pool.ConnectionCls = transport.make_timed_connection(pool.ConnectionCls, self._clock)
        return manager, pool

    def _connection_pool(self) -> HTTPConnectionPool:
        if os.getpid() != self._pid:
            # After a fork: two processes must not use the same TLS connection. The child drops the inherited sockets.
            with self._lock:
                if os.getpid() != self._pid:
                    self._manager, self._pool = self._connect()
                    self._pid = os.getpid()
        return self._pool


def _parse_date(header: str | None) -> datetime | None:
    try:
        return parsedate_to_datetime(header).replace(tzinfo=UTC) if header else None  # always GMT in HTTP
    except (ValueError, OverflowError):
        return None


def _list_meta(page: bytes) -> wire.ListMeta:
    """The metadata of a page of a list. Raises msgspec.DecodeError."""
    # The API server writes the metadata before the items, so it is enough to decode the beginning of the page. This
    # saves 0.2 s for 60,000 pods. The beginning is valid JSON only if the `items` are those of the list itself.
    begin, items_key, _ = page[:_LIST_HEAD_BYTES].partition(b'"items":[')
    if items_key:
        with contextlib.suppress(msgspec.DecodeError):
            return _decode_list_begin(begin + b'"items":[]}').metadata
    return _decode_list_head(page).metadata


def _read_body(response: urllib3.BaseHTTPResponse, max_bytes: int, call: str) -> bytes:
    """Read the body of the response. Raises TooLarge if it has more than `max_bytes` bytes, or Unreachable."""
    try:
        length = response.length_remaining
        if length is not None and length <= max_bytes and "Content-Encoding" not in response.headers:
            return response.data
        pieces, size = [], 0
        if length is None or length <= max_bytes:
            for piece in response.stream(_READ_BYTES):
                pieces.append(piece)
                size += len(piece)
                if size > max_bytes:
                    break
            else:
                return b"".join(pieces)
        response.close()
    except (ReadTimeoutError, TimeoutError) as error:
        raise errors.TimedOut(f"{call}: {error}") from error
    except (HTTPError, OSError, ValueError) as error:  # ValueError: http.client raises it for an invalid length
        raise errors.Unreachable(f"{call}: {error}") from error
    raise errors.TooLarge(f"{call}: the response has more than {max_bytes} bytes")


def _without_managed_fields(body: bytes) -> dict[str, Any]:
    """Decode an object without its managedFields. Raises Unreachable."""
    return _decode_object(body, wire.drop_managed_fields)


def _decode_object(body: bytes, prepare: Callable[[bytes], bytes] = bytes) -> dict[str, Any]:
    """Decode the object in `prepare(body)`. Raises Unreachable if the body is not a JSON object."""
    try:
        decoded = _decode(prepare(body))
    except msgspec.DecodeError as error:
        raise errors.Unreachable(f"the response is not JSON: {error}") from error
    if not isinstance(decoded, dict):
        raise errors.Unreachable("the response is JSON, but not an object")
    return decoded


def _socket_options() -> list[tuple[int, int, int]]:
    # Detects within a minute that the other end of a connection has vanished (node lost, NAT entry expired).
    return [
        *HTTPConnection.default_socket_options,
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000),
    ]
