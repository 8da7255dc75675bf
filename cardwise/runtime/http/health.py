"""The HTTP server of /metrics, /healthz, /readyz and /configz, on a separate port without TLS.

The port is separate for two reasons: probes and scrapers lack client certificates, and the device plugin and the MPS
manager have only this port. The server runs in threads. So start it after a fork, in the process whose health it
reports.
"""

import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any

import prometheus_client
import structlog
from prometheus_client import CollectorRegistry, exposition

from cardwise.clock import SYSTEM, Clock
from cardwise.runtime.http import configz
from cardwise.runtime.http.httpcalls import Environ
from cardwise.runtime.http.httpserver import HttpServer, Limits, Listener, PhaseLimits
from cardwise.runtime.http.threads import CallThreads
from cardwise.runtime.settings import HostPort
from cardwise.supervision import supervised_thread

_log = structlog.get_logger("cardwise.runtime.health")

# The kubelet, Prometheus and people have a few connections each. Even if twenty addresses have the maximum per address,
# a probe's connection is kept until its call is read.
_LIMITS = Limits(reading=PhaseLimits(2.0, 200), busy=8, source=100, body=0)

Problems = Callable[[], Sequence[str]]
"""Returns the reasons why the component is not ready (or not alive), one line each. Must return quickly; may raise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthSettings:
    """The settings of a serving process's `HealthServer`: address, settings in effect, folder of certificates."""

    bind: HostPort
    config: Mapping[str, Any] = field(default_factory=dict)
    certificates: Path | None = None


def _no_problems() -> Sequence[str]:
    return ()


class HealthServer:
    """The HTTP server of health and metrics.

    ready: the check of /readyz.
    alive: the check of /healthz; by default a process that answers is alive.
    notes: lines for people that /readyz shows after the result.
    config: the settings in effect, as `configz.describe_options` returns them.
    documents: JSON that is served at further paths; must return quickly.
    """

    def __init__(
        self,
        bind: HostPort,
        *,
        ready: Problems = _no_problems,
        alive: Problems = _no_problems,
        notes: Problems = _no_problems,
        registry: CollectorRegistry = prometheus_client.REGISTRY,
        config: Mapping[str, Any] | None = None,
        documents: Mapping[str, Callable[[], bytes]] | None = None,
        clock: Clock = SYSTEM,
    ) -> None:
        """Bind the port. Port 0 takes a free port, which `port` returns. Raises OSError if the port is in use."""
        self._checks = {"/readyz": ready, "/healthz": alive}
        self._notes = {"/readyz": notes}
        self._registry = registry
        self._clock = clock
        self._config = config or {}
        self._documents = documents or {}
        listening = _open_socket(bind)
        self.port = int(listening.getsockname()[1])
        # Probes have their own threads, so that scrapes do not delay them. One address may use two of the three
        # threads, so a kubelet's slow readiness check does not delay its liveness check.
        probe_threads, metric_threads = CallThreads("probes", 3), CallThreads("metrics", 1)
        listener = Listener(
            listening, lambda environ: probe_threads if environ["PATH_INFO"] in self._checks else metric_threads
        )
        self._server = HttpServer(self._answer, [listener], limits=_LIMITS, clock=clock)
        self._thread = supervised_thread(self._server.run, "health", clock)
        self._stopped = False

    def start(self) -> None:
        """Start serving, unless `stop` was called. Call `tune_interpreter` before, else scrapes delay probes."""
        if not self._stopped:
            self._thread.start()

    def stop(self) -> None:
        """Free the port. Calls that are in progress are still answered."""
        was_stopped, self._stopped = self._stopped, True
        self._server.stop()
        if self._thread.is_alive():
            self._clock.join(self._thread, 5.0)
        elif self._thread.ident is None and not was_stopped:
            self._server.run(graceful_seconds=0.0)  # the server closes its sockets at the end of `run`

    def _answer(self, environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        status, body, kind = self._respond(environ)
        start_response(f"{status.value} {status.phrase}", [("Content-Type", kind), ("Content-Length", str(len(body)))])
        return [body]

    def _respond(self, environ: Environ) -> tuple[HTTPStatus, bytes, str]:
        text, path = "text/plain; charset=utf-8", environ["PATH_INFO"]
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            return HTTPStatus.METHOD_NOT_ALLOWED, b"only GET and HEAD\n", text
        if path == "/metrics":
            return self._metrics(environ.get("HTTP_ACCEPT", ""))
        if path == "/configz":
            return HTTPStatus.OK, configz.encode_settings(self._config), "application/json"
        if path in self._documents:
            return HTTPStatus.OK, self._documents[path](), "application/json"
        if path in self._checks:
            return *_check_result(self._checks[path], self._notes.get(path, _no_problems)), text
        return HTTPStatus.NOT_FOUND, f"not found; try {', '.join(self._paths())}\n".encode(), text

    def _paths(self) -> list[str]:
        return ["/metrics", "/healthz", "/readyz", "/configz", *self._documents]

    def _metrics(self, accept: str) -> tuple[HTTPStatus, bytes, str]:
        try:
            encoder, content_type = exposition.choose_encoder(accept)
        except (TypeError, ValueError):  # a version in the header is not a number: ignore the header
            encoder, content_type = exposition.choose_encoder("")
        try:
            return HTTPStatus.OK, encoder(self._registry), content_type
        except Exception:  # noqa: BLE001 - collectors of other libraries may raise anything
            _log.exception("failed to collect metrics")
            return HTTPStatus.INTERNAL_SERVER_ERROR, b"collecting metrics failed; see the log\n", "text/plain"


def _check_result(list_problems: Problems, notes: Problems) -> tuple[HTTPStatus, bytes]:
    try:
        problems, lines = list(list_problems()), list(notes())
    except Exception as error:  # noqa: BLE001 - a failing check is reported as a problem
        _log.exception("health check failed")
        problems, lines = [f"the check itself failed: {error!r}"], []
    status = HTTPStatus.SERVICE_UNAVAILABLE if problems else HTTPStatus.OK
    return status, "".join(f"{line}\n" for line in (*(problems or ["ok"]), *lines)).encode()


def _open_socket(bind: HostPort) -> socket.socket:
    # Host "": if possible, listen on IPv6 with mapped IPv4, because kubelet and Prometheus use either of them.
    dual_stack = not bind.host and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual_stack or ":" in bind.host else socket.AF_INET
    # The backlog has the kernel's limit. While it is full, probes time out.
    listening = socket.create_server((bind.host, bind.port), family=family, backlog=4096, dualstack_ipv6=dual_stack)
    # The kernel's receive buffer of a connection counts as memory of this container. It must hold a complete head.
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32_768)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # accepted sockets inherit it
    return listening
