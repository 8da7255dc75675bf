"""The server of `cardwise web`: on 127.0.0.1, for requests that know the token.

Every user of the machine can connect to the port, and so can scripts of web pages in the person's browser. So each path
begins with a token of 256 random bits, and a request must name the address that is listened on as its host: a web page
that lets its own name resolve to 127.0.0.1 (DNS rebinding) sends its own name.
"""

import hmac
import secrets
import socket
import threading
from collections.abc import Iterable
from typing import Any, Final

from flask import Flask
from werkzeug.exceptions import BadRequest, Forbidden, HTTPException, MethodNotAllowed, NotFound
from werkzeug.serving import ThreadedWSGIServer, WSGIRequestHandler

_HOST: Final = "127.0.0.1"
MAX_CONNECTIONS: Final = 32  # connections at the same time; a browser opens at most 6 to one address
_IDLE_SECONDS: Final = 30.0  # a connection that takes no byte for so long is closed
_SECRET_BYTES: Final = 32


class TokenGate:
    """A WSGI application that passes only requests to its address and with its token on to `app`.

    port: the port that the browser must name in the header Host.
    """

    def __init__(self, app: Any, token: str, port: int) -> None:
        self._app = app
        self._token = token.encode()
        self._hosts = (f"{_HOST}:{port}", f"localhost:{port}")

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        refusal = self._refuse(environ)
        if refusal is not None:
            return refusal(environ, start_response)
        prefix = f"/{self._token.decode()}"
        environ["SCRIPT_NAME"], environ["PATH_INFO"] = prefix, environ["PATH_INFO"][len(prefix) :] or "/"
        return self._app(environ, start_response)  # type: ignore[no-any-return]

    def _refuse(self, environ: dict[str, Any]) -> HTTPException | None:
        host, origin = environ.get("HTTP_HOST", ""), environ.get("HTTP_ORIGIN")
        if host not in self._hosts:
            return BadRequest("Open the address that `cardwise web` printed.")
        if origin is not None and origin != f"http://{host}":
            return Forbidden("Another web page sent this request.")
        first_segment = environ.get("PATH_INFO", "").removeprefix("/").partition("/")[0]
        if not hmac.compare_digest(first_segment.encode("latin-1", "replace"), self._token):
            return NotFound("Open the address that `cardwise web` printed; it holds a new token after each start.")
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            return MethodNotAllowed(["GET", "HEAD"])
        return None


class _QuietHandler(WSGIRequestHandler):
    timeout = _IDLE_SECONDS

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Log nothing: the path contains the token."""


class PageServer(ThreadedWSGIServer):
    """Serves at most MAX_CONNECTIONS connections at a time; closes those beyond.

    address: where the browser finds the page, with the token.
    """

    def __init__(self, app: Flask, token: str, listener: socket.socket) -> None:
        self._slots = threading.BoundedSemaphore(MAX_CONNECTIONS)
        port = listener.getsockname()[1]
        gate = TokenGate(app.wsgi_app, token, port)
        super().__init__(_HOST, port, gate, handler=_QuietHandler, fd=listener.fileno())
        self.address = f"http://{_HOST}:{port}/{token}/"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread of its own. The socket server calls this."""
        if self._slots.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection. The socket server calls this in the connection's thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()


def open_server(app: Flask, port: int = 0) -> PageServer:
    """Listen with a new token. `port`: 0 for a free one. Raises OSError if the port is in use."""
    # Werkzeug, which duplicates the socket, would end the program if the port is in use.
    with socket.create_server((_HOST, port)) as listener:
        return PageServer(app, secrets.token_urlsafe(_SECRET_BYTES), listener)
