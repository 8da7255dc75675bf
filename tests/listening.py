"""An HTTP server on loopback in a thread of its own: what the small API servers of the tests stand on."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients of these tests hang up when they please."""


class Listening:
    """Handlers find who made this as `fake`."""

    def __init__(self, handler: type[BaseHTTPRequestHandler], fake: Any) -> None:
        self._server = _Server(("127.0.0.1", 0), type(handler.__name__, (handler,), {"fake": fake}))
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
