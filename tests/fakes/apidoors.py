"""The two ways into the API server of the tests: a KubeClient without sockets, and HTTP."""

import contextlib
import socket
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any

from cardwise.kube.client import KubeClient
from tests.fakes.apiserver import Answer, ApiServer, Request


class InMemoryClient(KubeClient):
    """A KubeClient whose connections end in the server object."""

    def __init__(self, api: ApiServer, **settings: Any) -> None:
        self.api = api
        self.settings = settings
        super().__init__("http://in-memory", **settings)

    def _connect(self) -> Any:
        return self, self  # neither the manager of connections nor the pool

    def clear(self) -> None:
        """As a PoolManager: there are no idle connections."""

    def urlopen(
        self, method: str, url: str, *, body: bytes | None, headers: Any, timeout: Any, **_: Any
    ) -> "_Response":
        return _Response(self.handle(Request.parse(method, url, body, headers, timeout.total)))

    def handle(self, request: Request) -> Answer:
        """Raises OSError where the client is to hear nothing."""
        return self.api.handle(request)


class _Response:
    """What KubeClient and Watch use of urllib3's."""

    def __init__(self, answer: Answer) -> None:
        self.status = answer.status
        self.headers = answer.headers
        self.data = answer.body
        self.length_remaining = len(answer.body) if answer.stream is None else None
        self._stream = answer.stream
        self.connection = self.sock = self  # where a Watch finds `settimeout`

    def settimeout(self, seconds: float | None) -> None:
        if self._stream is not None:
            self._stream.read_timeout = seconds

    def stream(self, *_: Any, **__: Any) -> Iterator[bytes]:
        return iter(self._stream) if self._stream is not None else iter((self.data,) if self.data else ())

    def shutdown(self) -> None:
        if self._stream is not None:
            self._stream.close()

    close = shutdown


class Handler(BaseHTTPRequestHandler):
    """For `tests.listening.Listening`."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    fake: ApiServer

    def log_message(self, *_: Any) -> None:
        pass

    def _any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            answer = self.fake.handle(Request.parse(self.command, self.path, body, dict(self.headers)))
            self.send_response_only(answer.status)
            for name, header in answer.headers.items():
                self.send_header(name, header)
            if answer.stream is None:
                self.send_header("Content-Length", str(len(answer.body)))
                self.end_headers()
                self.wfile.write(answer.body)
                return
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for part in answer.stream:
                self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
            self.wfile.write(b"0\r\n\r\n")
        except OSError:
            self.close_connection = True
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _any  # noqa: N815 - the names http.server looks for
