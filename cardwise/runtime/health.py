"""/metrics, /healthz, /readyz and /configz on a plain port of their own.

Apart from the serving port because probes and scrapers have no client certificates, and because the device plugin and
the MPS part serve nothing else. Runs in threads, so start it in the process whose health it tells (after a fork).
"""

import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import prometheus_client
import structlog
from prometheus_client import CollectorRegistry, exposition

from cardwise.runtime import configz
from cardwise.runtime.settings import HostPort

_log = structlog.get_logger(__name__)

Problems = Callable[[], Sequence[str]]
"""Why the part is not ready (or not alive), a line each; none: it is. Must answer quickly; may raise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What a serving process needs from `main` to show itself: where, its settings, and its certificates' folder."""

    bind: HostPort
    config: Mapping[str, Any] = field(default_factory=dict)
    certificates: Path | None = None


def _none() -> Sequence[str]:
    return ()


class HealthServer:
    """`ready` is asked by /readyz, `alive` by /healthz (by default whoever answers is alive). `config`: the settings in
    effect, as `configz.of` has them.
    """

    def __init__(
        self,
        bind: HostPort,
        *,
        ready: Problems = _none,
        alive: Problems = _none,
        registry: CollectorRegistry = prometheus_client.REGISTRY,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """Binds at once. Raises OSError when the port is taken; port 0 takes a free one, see `port`."""
        bound = {"ready": ready, "alive": alive, "registry": registry, "config": config or {}}
        handler = type("_BoundHandler", (_Handler,), bound)
        # "" as the host: IPv6 with IPv4 mapped where the machine has it, since kubelet and Prometheus use either.
        host, family = bind.host, socket.AF_INET6 if ":" in bind.host else socket.AF_INET
        if not host and socket.has_dualstack_ipv6():
            host, family = "::", socket.AF_INET6
        self._server = _DualStackServer((host, bind.port), handler, family)
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, name="health", daemon=True
        )

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Frees the port. Answers under way are finished by their own threads."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join(5.0)
        self._server.server_close()


class _DualStackServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler], family: int) -> None:
        self.address_family = family
        super().__init__(address, handler)

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6 and self.server_address[0] == "::":
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        # Not HTTPServer's, which asks the DNS for the host's name and can hang there.
        _bind(self)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        _log.debug("health request failed", client=str(client_address), exc_info=True)


def _bind(server: ThreadingHTTPServer) -> None:
    server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.socket.bind(server.server_address)
    server.server_address = server.socket.getsockname()
    server.server_name = str(server.server_address[0])
    server.server_port = int(server.server_address[1])


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 120.0  # seconds; an idle keep-alive connection holds a thread no longer than this
    disable_nagle_algorithm = True

    ready: Problems
    alive: Problems
    registry: CollectorRegistry
    config: Mapping[str, Any]

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            self._metrics()
        elif path == "/readyz":
            self._verdict(type(self).ready)
        elif path == "/healthz":
            self._verdict(type(self).alive)
        elif path == "/configz":
            self._answer(HTTPStatus.OK, configz.encode(type(self).config), "application/json")
        else:
            self._answer(HTTPStatus.NOT_FOUND, b"not found; try /metrics, /healthz, /readyz, /configz\n")

    do_HEAD = do_GET  # noqa: N815 - the name that http.server looks for

    def _metrics(self) -> None:
        encoder, content_type = exposition.choose_encoder(self.headers.get("Accept", ""))
        try:
            body = encoder(self.registry)
        except Exception:  # noqa: BLE001 - a collector is foreign code; logged and answered
            _log.exception("collecting metrics failed")
            self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, b"collecting metrics failed; see the log\n")
            return
        self._answer(HTTPStatus.OK, body, content_type)

    def _verdict(self, ask: Problems) -> None:
        try:
            problems = list(ask())
        except Exception as error:  # noqa: BLE001 - a check that fails is a problem, told as such
            _log.exception("health check failed")
            problems = [f"the check itself failed: {error!r}"]
        if problems:
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, ("\n".join(problems) + "\n").encode())
        else:
            self._answer(HTTPStatus.OK, b"ok\n")

    def _answer(self, status: HTTPStatus, body: bytes, content_type: str = "text/plain; charset=utf-8") -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Probes come every few seconds and say nothing."""
