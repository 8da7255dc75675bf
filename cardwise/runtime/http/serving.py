"""Serves a WSGI application in a child process, which the parent process replaces if it hangs.

gunicorn's arbiter starts, watches and stops the child; `httpserver` serves. There is only one serving process, because
the extender's ledger must exist only once. A second port ("slow") can have its own threads: bind calls of a gang wait
there for minutes without delaying the first port. TLS files are loaded again when they change.
"""

import faulthandler
import math
import os
import signal
import ssl
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import structlog
from gunicorn import glogging
from gunicorn.app.base import BaseApplication
from gunicorn.arbiter import Arbiter
from gunicorn.workers.base import Worker

from cardwise.clock import SYSTEM, Clock
from cardwise.runtime import interpreter
from cardwise.runtime.http import httpcalls
from cardwise.runtime.http.httpcalls import Environ, WsgiApp
from cardwise.runtime.http.httpserver import HttpServer, Limits, Listener
from cardwise.runtime.http.threads import CallThreads
from cardwise.runtime.settings import HostPort

_log = structlog.get_logger("cardwise.runtime.serving")

# The parent checks the heartbeat of the serving process at this interval, in seconds, and kills the process after
# several checks with the same heartbeat. The parent counts checks and not time, because both processes may have been
# frozen together.
_CHECK_SECONDS = 0.25
_MAX_MISSED_BEATS = 9
_CHECKS_FOR_THE_LOG = 2  # checks between the two signals, in which the process logs the stacks of its threads
_RELOAD_SECONDS = 5.0  # seconds after which unreadable TLS files are loaded again, even if they have not changed
_PROMPT_THREADS = 4  # threads for `Server.prompt`: one address may use three of them, and one owner of calls two
# On these signals gunicorn would start a second worker or master beside the first. Then there would be two ledgers, and
# no port for the second health server. A closing terminal sends SIGHUP to all processes.
_IGNORED_SIGNALS = (signal.SIGHUP, signal.SIGTTIN, signal.SIGTTOU, signal.SIGUSR2, signal.SIGWINCH)

Hook = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """PEM files, which may be replaced at any time. `ca` verifies client certificates."""

    cert: Path
    key: Path
    ca: Path | None = None

    @classmethod
    def in_dir(cls, directory: Path) -> Self:
        """The files of a directory, with the names of `tls.Rotator` and cert-manager."""
        return cls(cert=directory / "tls.crt", key=directory / "tls.key", ca=directory / "ca.crt")

    def signature(self) -> tuple[tuple[int, int, int] | None, ...]:
        """A value that changes when one of the files changes. None stands for a missing file."""
        return tuple(_file_signature(path) for path in (self.cert, self.key, self.ca) if path is not None)


class Server:
    """A server of one WSGI application. The hooks are called in the serving process.

    app: called in the serving process; returns the WSGI application. Must not start threads: use the hooks for this.
    binds: the addresses. Port 0 is not supported, since the process may be replaced.
    max_body_bytes: maximum number of bytes of a body; of a larger body the application gets only the size.
    threads: the number of threads that answer calls.
    client_ca: whether clients without a certificate of `tls.ca` are rejected.
    on_worker_start: called before the first call; an exception ends the server.
    on_worker_stopping: called when the process begins to stop; must let waiting calls end, and return at once.
    on_worker_stop: called when all calls are answered or `graceful_timeout` is nearly over.
    alive: called several times a second; returns at once. While it returns False there is no heartbeat, and after two
        to three seconds the process is replaced.
    call_owner: returns the owner of a call (such as a namespace), by the call's environ; see `Listener`.
    prompt: the paths whose calls have separate threads, and so never wait for other calls.
    long_threads: the number of threads for calls that take long (`httpcalls.move_long_call`). 0: such calls are not
        moved.
    slow_bind: an address whose calls have up to `slow_threads` separate threads.
    graceful_timeout: seconds in which running calls may end when the server stops.
    """

    def __init__(
        self,
        app: Callable[[], WsgiApp],
        binds: Sequence[HostPort],
        *,
        max_body_bytes: int,
        threads: int = 4,
        tls: TlsFiles | None = None,
        client_ca: bool = False,
        on_worker_start: Hook = lambda: None,
        on_worker_stopping: Hook = lambda: None,
        on_worker_stop: Hook = lambda: None,
        alive: Callable[[], bool] = lambda: True,
        call_owner: Callable[[Environ], str] | None = None,
        prompt: Collection[str] = (),
        long_threads: int = 0,
        slow_bind: HostPort | None = None,
        slow_threads: int = 64,
        graceful_timeout: float = 30.0,
    ) -> None:
        if client_ca and (tls is None or tls.ca is None):
            raise ValueError("client_ca needs tls with a ca file")
        self.app = app
        self.on_start = on_worker_start
        self.on_stop = on_worker_stop
        self.on_stopping = on_worker_stopping
        self.alive = alive
        self.call_owner = call_owner
        self.prompt = frozenset(prompt)
        self.threads = threads
        self.long_threads = long_threads
        self.slow_threads = slow_threads if slow_bind is not None else 0
        self.context = _Contexts(tls, client_ca=client_ca) if tls is not None else None
        self.limits = Limits(body=max_body_bytes, held=max(64 << 20, 2 * max_body_bytes))
        addresses = [*binds, slow_bind] if slow_bind is not None else list(binds)
        self._settings: dict[str, Any] = {
            "bind": [str(address) if address.host else f"[::]:{address.port}" for address in addresses],
            "workers": 1,
            "worker_class": type("CardwiseWorker", (_Worker,), {"server": self}),
            "graceful_timeout": max(1, round(graceful_timeout)),
            # The folder of the heartbeat file. On a busy disk late heartbeats could make the parent end a healthy
            # process.
            "worker_tmp_dir": "/dev/shm" if os.access("/dev/shm", os.W_OK) else None,  # noqa: S108
            "control_socket_disable": True,
            "logger_class": _Logger,
            "accesslog": None,
            "preload_app": False,
            "proc_name": "cardwise",
            "when_ready": _ignore_signals,
            "post_fork": _leave_time_to_stop,
            "post_worker_init": self._on_worker_started,
            "worker_exit": self._on_worker_stopped,
        }

    def run(self) -> None:
        """Serve until SIGTERM or SIGINT, then raise SystemExit as gunicorn does. The exit code is above 0 if the
        process cannot be started.
        """
        _Application(self._settings, self.app).run()

    def _on_worker_started(self, worker: Any) -> None:
        _ignore_signals(worker)
        # When the parent kills this process, the stacks of its threads are logged.
        signal.signal(signal.SIGABRT, signal.SIG_DFL)
        faulthandler.enable()
        interpreter.tune_interpreter()
        self.on_start()

    def _on_worker_stopped(self, _arbiter: Any, worker: Any) -> None:
        # gunicorn calls this function in the worker, and again in the master when the worker has ended.
        if worker.pid == os.getpid() and worker.booted:
            self.on_stop()


class _Application(BaseApplication):  # type: ignore[misc]
    def __init__(self, settings: dict[str, Any], app: Callable[[], WsgiApp]) -> None:
        self._our_settings = settings
        self._our_app = app
        super().__init__()

    def load_config(self) -> None:
        for name, setting in self._our_settings.items():
            self.cfg.set(name, setting)

    def load(self) -> WsgiApp:
        return self._our_app()

    def run(self) -> None:
        _Parent(self).run()


class _Parent(Arbiter):  # type: ignore[misc]
    """gunicorn's arbiter with faster checks.

    gunicorn's own checks count whole seconds, and need two of them to kill a silent worker.
    """

    def wait_for_signals(self, timeout: float = _CHECK_SECONDS) -> list[int]:
        return super().wait_for_signals(min(timeout, _CHECK_SECONDS))  # type: ignore[no-any-return]

    def murder_workers(self) -> None:
        for pid, worker in list(self.WORKERS.items()):
            missed = worker.missed_heartbeats()
            if missed == _MAX_MISSED_BEATS:
                _log.error("replacing the serving process: it hangs; the stacks of its threads follow", worker=pid)
                self.kill_worker(pid, signal.SIGABRT)
            elif missed > _MAX_MISSED_BEATS + _CHECKS_FOR_THE_LOG:
                self.kill_worker(pid, signal.SIGKILL)  # a stopped process (SIGSTOP) does not react to the first signal


class _Worker(Worker):  # type: ignore[misc]
    """The serving process, and the parent's view of it."""

    server: Server
    wsgi: WsgiApp
    serving: HttpServer | None = None

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._last_beat = self._first_beat = self.tmp.last_update()
        self._missed_beats = 0

    def missed_heartbeats(self) -> int:
        """The number of checks with the same heartbeat, including this one. Called in the parent."""
        beat = self.tmp.last_update()
        self._missed_beats = self._missed_beats + 1 if beat == self._last_beat != self._first_beat else 0
        self._last_beat = beat
        return self._missed_beats

    def run(self) -> None:
        server = self.server
        fast, slow = CallThreads("fast", server.threads), CallThreads("slow", server.slow_threads)
        prompt, long = CallThreads("prompt", _PROMPT_THREADS), CallThreads("long", server.long_threads)
        has_long = server.long_threads > 0

        def route(environ: Environ) -> CallThreads:
            if environ.get(httpcalls.LONG_OWNER_KEY) is not None:
                return long
            return prompt if environ["PATH_INFO"] in server.prompt else fast

        def route_slow(environ: Environ) -> CallThreads:
            return slow if environ.get(httpcalls.LONG_OWNER_KEY) is None else long

        listeners = [
            Listener(listening.sock, route, long=has_long, call_owner=server.call_owner) for listening in self.sockets
        ]
        if server.slow_threads:  # the slow address is the last of the addresses
            listeners[-1] = Listener(self.sockets[-1].sock, route_slow, slow=True, long=has_long)
        self.serving = HttpServer(
            self.wsgi, listeners, context=server.context, limits=server.limits, stopping=server.on_stopping
        )
        if not self.alive:
            self.serving.stop()  # a signal may have arrived before
        self.serving.run(self._tick, self.cfg.graceful_timeout)

    def handle_exit(self, sig: int, frame: Any) -> None:
        super().handle_exit(sig, frame)
        if self.serving is not None:
            self.serving.stop()

    def _tick(self) -> None:
        if self.server.alive():
            self.notify()
        if self.ppid != os.getppid() and self.serving is not None:
            self.serving.stop()  # the parent has ended, so nothing would replace this process if it hangs


class _Logger(glogging.Logger):  # type: ignore[misc]
    """gunicorn's logger, with the root handler of `logs.configure`."""

    def setup(self, cfg: Any) -> None:
        super().setup(cfg)
        for logger in (self.error_log, self.access_log):
            logger.handlers.clear()
            logger.propagate = True


def _ignore_signals(_process: Any) -> None:
    """Ignore signals in the master and in the worker, after gunicorn has set its handlers."""
    for number in _IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _leave_time_to_stop(_arbiter: Any, worker: Any) -> None:
    # The master kills this process after graceful_timeout. The limit here is a little shorter, so that on_worker_stop
    # still runs if a request hangs.
    limit = worker.cfg.graceful_timeout
    worker.cfg.set("graceful_timeout", max(1, limit - max(1, limit // 5)))


def server_context(cert: Path, key: Path, client_ca: Path | None) -> ssl.SSLContext:
    """A TLS context for TLS 1.2 and later; with `client_ca`, clients need a certificate of that CA."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(cert, key)
    if client_ca is not None:
        context.load_verify_locations(cafile=client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _file_signature(path: Path) -> tuple[int, int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns, stat.st_size


class _Contexts:
    """Returns the TLS context for a new connection. The context is loaded again when the files change.

    Unreadable files are loaded again when they change, and every `_RELOAD_SECONDS`. Until then the former context is
    used. The error is logged only once, since each new connection calls this.
    """

    def __init__(self, files: TlsFiles, *, client_ca: bool, clock: Clock = SYSTEM) -> None:
        self._files = files
        self._client_ca = client_ca
        self._clock = clock
        self._signature: object = None
        self._context: ssl.SSLContext | None = None
        self._error = ""  # the error of the last load; "" without one
        self._reload_at = math.inf

    def __call__(self) -> ssl.SSLContext:
        """The present context. Raises OSError until the files could be read once."""
        signature = self._files.signature()
        if signature != self._signature or self._clock.now() >= self._reload_at:
            self._load(logs=signature != self._signature)
            self._signature = signature
        if self._context is None:
            raise OSError(self._error)
        return self._context

    def _load(self, *, logs: bool) -> None:
        files = self._files
        try:
            self._context = server_context(files.cert, files.key, files.ca if self._client_ca else None)
        except OSError as error:  # also ssl.SSLError
            self._error, self._reload_at = str(error), self._clock.now() + _RELOAD_SECONDS
            if logs and self._context is None:
                _log.error("failed to read the TLS files; refusing connections", error=self._error)
            elif logs:
                _log.warning("failed to read the TLS files; keeping the current certificate", error=self._error)
            return
        self._reload_at = math.inf
        _log.info("loaded the TLS certificate", cert=str(files.cert))
