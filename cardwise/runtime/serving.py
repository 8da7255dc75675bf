"""Serves a WSGI application by gunicorn inside our own process: one worker, threads, TLS that follows its files.

One worker, because the extender's ledger must exist once. Beside gunicorn's threads there can be a second port with
threads of its own ("slow"): bind calls of a gang wait there for minutes, and the fast port never feels it.
What gunicorn lacks for clients that hang (time limits on handshakes and reads) is in `cardwise.runtime.gthreads`.
"""

import os
import signal
import ssl
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import structlog
from gunicorn import glogging
from gunicorn.app.base import BaseApplication

from cardwise.runtime import gthreads
from cardwise.runtime.settings import HostPort

_log = structlog.get_logger(__name__)

# Go clients drop idle connections after 90 s. Were we the first to close, a request could meet the closing
# connection, and Go does not repeat a POST.
KEEPALIVE_SECONDS = 100
# gunicorn kills a worker whose main loop (not its requests) is silent for so long.
HEARTBEAT_SECONDS = 60
# By these gunicorn starts a second worker (or a second master) beside the first: two ledgers, and no port for the
# health server. A terminal that closes sends SIGHUP to all of us.
_IGNORED = (signal.SIGHUP, signal.SIGTTIN, signal.SIGTTOU, signal.SIGUSR2, signal.SIGWINCH)

WsgiApp = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]
Hook = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """PEM files; `ca` verifies client certificates. They may be replaced at any time."""

    cert: Path
    key: Path
    ca: Path | None = None

    @classmethod
    def in_dir(cls, directory: Path) -> Self:
        """As `tls.Rotator` and cert-manager name them."""
        return cls(cert=directory / "tls.crt", key=directory / "tls.key", ca=directory / "ca.crt")

    def signature(self) -> tuple[tuple[int, int, int], ...]:
        """Changes when one of the files does. Raises OSError when one is missing."""
        paths = (self.cert, self.key) if self.ca is None else (self.cert, self.key, self.ca)
        stats = [path.stat() for path in paths]
        return tuple((each.st_ino, each.st_mtime_ns, each.st_size) for each in stats)


class Server:
    """`app` is called in the worker process and returns the WSGI application; threads belong into the hooks.

    - `on_worker_start`: in the worker, before the first request; an exception ends the server.
    - `on_worker_stopping`: in the worker, when it begins to stop; ends what calls wait for. Returns at once.
    - `on_worker_stop`: when requests are done or `graceful_timeout` (seconds) is nearly over.

    `slow_bind`: connections to it are served by up to `slow_threads` threads of their own. `client_ca`: refuse clients
    without a certificate of `tls.ca`. A port of 0 is not supported, since the worker may be restarted.
    """

    def __init__(
        self,
        app: Callable[[], WsgiApp],
        binds: Sequence[HostPort],
        *,
        threads: int = 4,
        tls: TlsFiles | None = None,
        client_ca: bool = False,
        on_worker_start: Hook | None = None,
        on_worker_stopping: Hook | None = None,
        on_worker_stop: Hook | None = None,
        slow_bind: HostPort | None = None,
        slow_threads: int = 64,
        graceful_timeout: float = 30.0,
    ) -> None:
        if client_ca and (tls is None or tls.ca is None):
            raise ValueError("client_ca needs tls with a ca file")
        self._app = app
        self._on_start = on_worker_start
        self._on_stop = on_worker_stop
        addresses = [*binds, slow_bind] if slow_bind is not None else list(binds)
        self._settings: dict[str, Any] = {
            "bind": [str(address) if address.host else f"[::]:{address.port}" for address in addresses],
            "workers": 1,
            "worker_class": gthreads.worker_class(
                slow=slow_bind is not None, slow_threads=slow_threads, stopping=on_worker_stopping
            ),
            "threads": threads,
            "worker_connections": 10_000,
            "keepalive": KEEPALIVE_SECONDS,
            "timeout": HEARTBEAT_SECONDS,
            "graceful_timeout": max(1, round(graceful_timeout)),
            # The heartbeat file; a disk under load would make the master kill a healthy worker.
            "worker_tmp_dir": "/dev/shm" if os.access("/dev/shm", os.W_OK) else None,  # noqa: S108
            "control_socket_disable": True,
            "logger_class": _Logger,
            "accesslog": None,
            "preload_app": False,
            "proc_name": "cardwise",
            "when_ready": _ignore_signals,
            "post_fork": _leave_time_to_stop,
            "post_worker_init": self._started,
            "worker_exit": self._stopped,
        }
        if tls is not None:
            self._settings |= {
                "certfile": str(tls.cert),
                "keyfile": str(tls.key),
                "ca_certs": str(tls.ca) if tls.ca is not None else None,
                "ssl_context": _Contexts(tls, client_ca=client_ca),
            }

    def run(self) -> None:
        """Blocks until SIGTERM or SIGINT, then raises SystemExit, as gunicorn does; not 0 if no worker can start."""
        _Application(self._settings, self._app).run()

    def _started(self, worker: Any) -> None:
        _ignore_signals(worker)
        if self._on_start is not None:
            self._on_start()

    def _stopped(self, _arbiter: Any, worker: Any) -> None:
        # gunicorn calls this in the worker, and once more in the master when it reaps a child.
        if worker.pid == os.getpid() and worker.booted and self._on_stop is not None:
            self._on_stop()


class _Application(BaseApplication):  # type: ignore[misc]
    def __init__(self, settings: dict[str, Any], app: Callable[[], WsgiApp]) -> None:
        self._our_settings = settings
        self._our_app = app
        super().__init__()

    def load_config(self) -> None:
        for name, value in self._our_settings.items():
            # control_socket_* came with 25.1.
            if name in self.cfg.settings:
                self.cfg.set(name, value)

    def load(self) -> WsgiApp:
        return self._our_app()


class _Logger(glogging.Logger):  # type: ignore[misc]
    """gunicorn's lines through the root handler of `logs.setup`."""

    def setup(self, cfg: Any) -> None:
        super().setup(cfg)
        for logger in (self.error_log, self.access_log):
            logger.handlers.clear()
            logger.propagate = True


def _ignore_signals(_process: Any) -> None:
    """In the master and in the worker, after gunicorn has set its own handlers there."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)


def _leave_time_to_stop(_arbiter: Any, worker: Any) -> None:
    # The master kills after graceful_timeout; in this process the limit comes a little earlier, so that
    # on_worker_stop still runs when a request hangs.
    limit = worker.cfg.graceful_timeout
    worker.cfg.set("graceful_timeout", max(1, limit - max(1, limit // 5)))


class _Contexts:
    """gunicorn's ssl_context hook: called for every connection, so it keeps the context while the files stay."""

    def __init__(self, files: TlsFiles, *, client_ca: bool) -> None:
        self._files = files
        self._client_ca = client_ca
        self._signature: object = None
        self._context: ssl.SSLContext | None = None

    def __call__(self, _cfg: Any, _default: Any) -> ssl.SSLContext:
        context = self._context
        try:
            signature = self._files.signature()
            if context is not None and signature == self._signature:
                return context
            context = gthreads.server_context(
                self._files.cert, self._files.key, self._files.ca if self._client_ca else None
            )
        except (OSError, ssl.SSLError) as error:
            # Files in the middle of a change; the next connection looks again.
            if self._context is None:
                raise
            _log.warning("TLS files cannot be read, keeping the former certificate", error=str(error))
            return self._context
        # Two threads may do this at once; either's result is right.
        self._context, self._signature = context, signature
        _log.info("TLS certificate loaded", cert=str(self._files.cert))
        return context
