"""Keeps the device plugin registered with the kubelet, through restarts of both.

The kubelet forgets plugins when it restarts, deletes every socket in the folder when it starts, and can lose a plugin
without either noticing: until Kubernetes 1.37 the late end of an old stream removed the new plugin. So each
registration has a socket of its own, and is made again when kubelet.sock is another one, our socket is gone, the
kubelet's stream has ended, or the node goes on showing no slots.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc
import structlog

from cardwise.clock import SYSTEM, Clock
from cardwise.core.api import names
from cardwise.runtime.loops import Loop
from deviceplugin.api import deviceplugin_v1beta1_pb2 as wire
from deviceplugin.plugin.server import OPTIONS, PluginServer
from deviceplugin.publish import metrics
from deviceplugin.sources.calls import CHANNEL_OPTIONS, call

_log = structlog.get_logger(__name__)

API_VERSION = "v1beta1"
_SERVICE = wire.DESCRIPTOR.services_by_name["Registration"]
PREFIX = "cardwise-share-"
_POLL_SECONDS = 0.25
_REGISTER_TIMEOUT = 10.0
_STREAM_SECONDS = 3.0  # the kubelet connects back within a second
_ZERO_SECONDS = 30.0  # the kubelet reports its node every 10 s

SocketIdentity = tuple[int, int, int]


def identity(socket: Path) -> SocketIdentity | None:
    """What tells one socket from the next at the same path; None where there is none. An inode alone may recur."""
    try:
        found = socket.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_ctime_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """What is seen of a registration. Times in seconds, None: not so at present."""

    kubelet: SocketIdentity | None
    registered_with: SocketIdentity | None
    own_socket: bool
    without_stream: float | None
    showing_zero: float | None


def why_again(sight: Sight) -> str:
    """Why we have to register (again), "" when we need not or cannot. Pure."""
    if sight.kubelet is None:
        return ""
    if sight.registered_with is None:
        return "not registered"
    if sight.kubelet != sight.registered_with:
        return "kubelet.sock is another one: the kubelet has restarted"
    if not sight.own_socket:
        return "our socket was removed"
    if sight.without_stream is not None and sight.without_stream >= _STREAM_SECONDS:
        return "the kubelet's stream has ended"
    if sight.showing_zero is not None and sight.showing_zero >= _ZERO_SECONDS:
        return f"the node goes on showing no {names.SHARE}"
    return ""


class NotRegistered(Exception):
    """The kubelet did not take the registration, or it is too early for one."""


class Registration:
    """One thread. `serve` makes the server for a socket path, None while it is too early to serve."""

    def __init__(
        self,
        folder: Path,
        serve: Callable[[Path], PluginServer | None],
        share_allocatable: Callable[[], str],
        clock: Clock = SYSTEM,
    ) -> None:
        self._folder = folder
        self._kubelet_socket = folder / "kubelet.sock"
        self._serve = serve
        self._share_allocatable = share_allocatable
        self._server: PluginServer | None = None
        self._registered_with: SocketIdentity | None = None
        self._stream_lost: float | None = None
        self._zero_since: float | None = None
        self._count = 0
        self._clock = clock
        self._loop = Loop(
            "registration",
            self._look_after_it,
            failed="registration failed",
            failures=metrics.FAILURES,
            expected=(NotRegistered, OSError),
            every=_POLL_SECONDS,
            clock=clock,
        )

    def start(self) -> None:
        self._loop.start()

    def stop(self) -> None:
        self._loop.stop(timeout=15.0)
        self._end_server(grace=2.0)

    @property
    def problem(self) -> str:
        """Why the kubelet does not count on us at present, "" when it does."""
        server = self._server
        if self._registered_with is None or server is None:
            return f"not registered with the kubelet at {self._kubelet_socket}"
        if identity(self._kubelet_socket) != self._registered_with:
            return f"the kubelet at {self._kubelet_socket} is gone or new"
        return "" if server.streams else "the kubelet has not connected back"

    def _look_after_it(self) -> None:
        why = why_again(self._look())
        if why:
            _log.info("registering", why=why)
            self._register()

    def _look(self) -> Sight:
        now = self._clock.now()
        server = self._server
        if server is None or server.streams:
            self._stream_lost = None
        elif self._stream_lost is None:
            self._stream_lost = now
        if self._share_allocatable() != "0" or server is None or not server.streams:
            self._zero_since = None
        elif self._zero_since is None:
            self._zero_since = now
        return Sight(
            kubelet=identity(self._kubelet_socket),
            registered_with=self._registered_with,
            own_socket=server is not None and server.socket.exists(),
            without_stream=None if self._stream_lost is None else now - self._stream_lost,
            showing_zero=None if self._zero_since is None else now - self._zero_since,
        )

    def _register(self) -> None:
        """Raises NotRegistered or OSError."""
        # The old stream ends first: the kubelet up to 1.36 takes a late end for the new plugin's.
        self._end_server(grace=0.5)
        kubelet = identity(self._kubelet_socket)
        self._count += 1
        socket = self._folder / f"{PREFIX}{os.getpid()}-{self._clock.wall_ns() // 1_000_000 % 10**9}-{self._count}.sock"
        server = self._serve(socket)
        if server is None:
            raise NotRegistered("the container runtime has not said yet how containers get their cards")
        self._remove_stale()
        server.start()
        self._server = server
        message = wire.RegisterRequest(
            version=API_VERSION, endpoint=socket.name, resource_name=names.SHARE, options=OPTIONS
        )
        try:
            with grpc.insecure_channel(f"unix:{self._kubelet_socket}", options=CHANNEL_OPTIONS) as channel:
                call(channel, _SERVICE, "Register", message, _REGISTER_TIMEOUT)
        except grpc.RpcError as error:
            raise NotRegistered(error.details()) from error
        self._registered_with = kubelet
        self._stream_lost = self._zero_since = None
        _log.info("registered", resource=names.SHARE, socket=socket.name)

    def _end_server(self, grace: float) -> None:
        server, self._server = self._server, None
        self._registered_with = None
        if server is not None:
            server.stop(grace)

    def _remove_stale(self) -> None:
        """Sockets of earlier processes of ours, which were killed. One agent runs on a node."""
        for path in self._folder.glob(f"{PREFIX}*.sock"):
            path.unlink(missing_ok=True)
