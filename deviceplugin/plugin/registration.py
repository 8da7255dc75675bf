"""Keeps the device plugin registered with the kubelet, through restarts of both.

When the kubelet starts, it has forgotten its plugins and deletes every socket in the folder. The kubelet can also drop
a plugin without an error on either side: before Kubernetes 1.37 the late end of an old stream removed the new plugin.
So each registration has its own socket. The plugin registers again in four cases: kubelet.sock was replaced, our socket
was removed, the kubelet's stream has ended, or the node keeps reporting no slots.
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
from deviceplugin.plugin.server import PLUGIN_OPTIONS, PluginServer
from deviceplugin.publish import metrics
from deviceplugin.sources.calls import CHANNEL_OPTIONS, call_unary

_log = structlog.get_logger(__name__)

API_VERSION = "v1beta1"
_SERVICE = wire.DESCRIPTOR.services_by_name["Registration"]
SOCKET_PREFIX = "cardwise-share-"
_POLL_SECONDS = 0.25
_REGISTER_TIMEOUT = 10.0
# The plugin registers again after this time without a stream; a kubelet opens the stream within a second.
_NO_STREAM_SECONDS = 3.0
# The plugin registers again if the node has reported 0 slots for this time; the kubelet reports its node every 10 s.
_ZERO_SLOTS_SECONDS = 30.0

SocketIdentity = tuple[int, int, int]


def socket_identity(socket: Path) -> SocketIdentity | None:
    """The identity of the socket at this path; None if there is no socket. More than the inode, because inodes are
    reused.
    """
    try:
        status = socket.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_ctime_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistrationState:
    """The observed state of a registration.

    kubelet: the identity of the present kubelet.sock; None if the file is missing.
    registered_kubelet: the identity of the kubelet.sock with which the plugin is registered.
    has_own_socket: whether the plugin's socket exists.
    no_stream_seconds: seconds since the kubelet's last stream ended; None while a stream is open.
    zero_slots_seconds: how long the node has reported 0 slots; None while it reports more.
    """

    kubelet: SocketIdentity | None
    registered_kubelet: SocketIdentity | None
    has_own_socket: bool
    no_stream_seconds: float | None
    zero_slots_seconds: float | None


def reregister_reason(state: RegistrationState) -> str | None:
    """Why the plugin has to register (again). None if registration is not needed, or if the kubelet is down. Pure."""
    if state.kubelet is None:
        return None
    if state.registered_kubelet is None:
        return "not registered"
    if state.kubelet != state.registered_kubelet:
        return "kubelet.sock was replaced: the kubelet has restarted"
    if not state.has_own_socket:
        return "our socket was removed"
    if state.no_stream_seconds is not None and state.no_stream_seconds >= _NO_STREAM_SECONDS:
        return "the kubelet's stream has ended"
    if state.zero_slots_seconds is not None and state.zero_slots_seconds >= _ZERO_SLOTS_SECONDS:
        return f"the node keeps reporting no {names.SHARE}"
    return None


class NotRegistered(Exception):
    """The kubelet rejected the registration, or the container runtime has not answered yet."""


class Registration:
    """Keeps the plugin registered, in one thread.

    folder: the kubelet's folder of sockets.
    create_server: creates the server for a socket; returns None until the container runtime has answered.
    share_allocatable: returns the node's allocatable slots as the kubelet reports them; None if unknown.
    """

    def __init__(
        self,
        folder: Path,
        create_server: Callable[[Path], PluginServer | None],
        share_allocatable: Callable[[], str | None],
        clock: Clock = SYSTEM,
    ) -> None:
        self._folder = folder
        self._kubelet_socket = folder / "kubelet.sock"
        self._create_server = create_server
        self._share_allocatable = share_allocatable
        self._server: PluginServer | None = None
        self._registered_kubelet: SocketIdentity | None = None
        self._no_stream_since: float | None = None
        self._zero_slots_since: float | None = None
        self._socket_count = 0
        self._clock = clock
        self._loop = Loop(
            "registration",
            self._register_if_needed,
            failed="registration failed",
            failures=metrics.THREAD_FAILURES,
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
    def problem(self) -> str | None:
        """Why the plugin is not registered at present; None if it is registered."""
        server = self._server
        if self._registered_kubelet is None or server is None:
            return f"not registered with the kubelet at {self._kubelet_socket}"
        if socket_identity(self._kubelet_socket) != self._registered_kubelet:
            return f"the kubelet at {self._kubelet_socket} is gone or has restarted"
        return None if server.streams else "the kubelet has not connected back"

    def _register_if_needed(self) -> None:
        reason = reregister_reason(self._observe_state())
        if reason:
            _log.info("registering with the kubelet", reason=reason)
            self._register()

    def _observe_state(self) -> RegistrationState:
        now = self._clock.now()
        server = self._server
        if server is None or server.streams:
            self._no_stream_since = None
        elif self._no_stream_since is None:
            self._no_stream_since = now
        if self._share_allocatable() != "0" or server is None or not server.streams:
            self._zero_slots_since = None
        elif self._zero_slots_since is None:
            self._zero_slots_since = now
        return RegistrationState(
            kubelet=socket_identity(self._kubelet_socket),
            registered_kubelet=self._registered_kubelet,
            has_own_socket=server is not None and server.socket.exists(),
            no_stream_seconds=None if self._no_stream_since is None else now - self._no_stream_since,
            zero_slots_seconds=None if self._zero_slots_since is None else now - self._zero_slots_since,
        )

    def _register(self) -> None:
        """Register with the kubelet on a new socket. Raises NotRegistered or OSError."""
        # End the old stream first: if it ends late, kubelets up to 1.36 remove the new plugin.
        self._end_server(grace=0.5)
        kubelet = socket_identity(self._kubelet_socket)
        self._socket_count += 1
        socket = (
            self._folder
            / f"{SOCKET_PREFIX}{os.getpid()}-{self._clock.wall_ns() // 1_000_000 % 10**9}-{self._socket_count}.sock"
        )
        server = self._create_server(socket)
        if server is None:
            raise NotRegistered("the container runtime has not answered yet whether it serves CDI")
        self._remove_stale_sockets()
        server.start()
        self._server = server
        message = wire.RegisterRequest(
            version=API_VERSION, endpoint=socket.name, resource_name=names.SHARE, options=PLUGIN_OPTIONS
        )
        try:
            with grpc.insecure_channel(f"unix:{self._kubelet_socket}", options=CHANNEL_OPTIONS) as channel:
                call_unary(channel, _SERVICE, "Register", message, _REGISTER_TIMEOUT)
        except grpc.RpcError as error:
            raise NotRegistered(error.details()) from error
        self._registered_kubelet = kubelet
        self._no_stream_since = self._zero_slots_since = None
        _log.info("registered with the kubelet", resource=names.SHARE, socket=socket.name)

    def _end_server(self, grace: float) -> None:
        server, self._server = self._server, None
        self._registered_kubelet = None
        if server is not None:
            server.stop(grace)

    def _remove_stale_sockets(self) -> None:
        """Remove the sockets of earlier processes of this plugin that were killed. Only one plugin runs on a node."""
        for path in self._folder.glob(f"{SOCKET_PREFIX}*.sock"):
            path.unlink(missing_ok=True)
