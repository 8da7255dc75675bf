"""The DRA plugin that the kubelet calls for pods with a ResourceClaim of Cardwise, and its registration.

The kubelet watches its folder plugins_registry. It calls GetInfo on each socket there, also after its own restart, and
then connects to the plugin's service on a second socket. So this plugin never has to call the kubelet; it only keeps
both sockets in place.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import structlog

from cardwise.clock import SYSTEM, Clock
from cardwise.core.api import names
from cardwise.core.values.wording import sanitize_message
from cardwise.runtime.loops import Loop
from deviceplugin.api import dra_v1_pb2 as dra
from deviceplugin.api import pluginregistration_v1_pb2 as registration
from deviceplugin.grants.claims import ClaimName, ContainerDevices
from deviceplugin.grants.granting import IsActive, StartRefused
from deviceplugin.plugin.serving import SocketServer, describe_failure, unary
from deviceplugin.publish import metrics

_log = structlog.get_logger(__name__)

_SERVICE = dra.DESCRIPTOR.services_by_name["DRAPlugin"]
_REGISTRATION = registration.DESCRIPTOR.services_by_name["Registration"]
# The kubelet's names: the type of the plugin, and the version of the service (Kubernetes 1.34 and later).
_TYPE, _VERSION = "DRAPlugin", "v1.DRAPlugin"
_MAX_THREADS = 64
_REGISTRATION_THREADS = 4
_POLL_SECONDS = 0.25

Prepare = Callable[[ClaimName, IsActive], Sequence[ContainerDevices]]
"""Prepares a claim for its pod. Raises StartRefused."""


class _ClaimServer:
    """Serves both sockets, from `start` to `stop`."""

    def __init__(
        self,
        kubelet_dir: Path,
        prepare: Prepare,
        unprepare: Callable[[ClaimName], None],
        on_registered: Callable[[str], None],
    ) -> None:
        folder = kubelet_dir / "plugins" / names.DRIVER
        self._prepare = prepare
        self._unprepare = unprepare
        self._on_registered = on_registered
        self._server = SocketServer(
            folder / "dra.sock",
            _SERVICE.full_name,
            {
                "NodePrepareResources": unary(self._prepare_resources, dra.NodePrepareResourcesRequest),
                "NodeUnprepareResources": unary(self._unprepare_resources, dra.NodeUnprepareResourcesRequest),
            },
            _MAX_THREADS,
        )
        self._registration = SocketServer(
            kubelet_dir / "plugins_registry" / f"{names.DRIVER}-reg.sock",
            _REGISTRATION.full_name,
            {
                "GetInfo": unary(self._get_info, registration.InfoRequest),
                "NotifyRegistrationStatus": unary(self._notify_status, registration.RegistrationStatus),
            },
            _REGISTRATION_THREADS,
        )

    @property
    def has_sockets(self) -> bool:
        return self._server.socket.exists() and self._registration.socket.exists()

    def start(self) -> None:
        """Listen on both sockets. Raises OSError."""
        for server in (self._server, self._registration):  # the kubelet looks for the second one, and calls the first
            server.socket.parent.mkdir(parents=True, exist_ok=True)
            server.socket.unlink(missing_ok=True)  # of a plugin that was killed
            server.start()

    def stop(self, grace: float = 0.0) -> None:
        """Withdraw the plugin from the kubelet, and wait up to `grace` seconds for running calls."""
        self._registration.stop()
        self._server.stop(grace)

    def _get_info(self, _: registration.InfoRequest, __: IsActive) -> registration.PluginInfo:
        return registration.PluginInfo(
            type=_TYPE, name=names.DRIVER, endpoint=str(self._server.socket), supported_versions=[_VERSION]
        )

    def _notify_status(
        self, status: registration.RegistrationStatus, _: IsActive
    ) -> registration.RegistrationStatusResponse:
        self._on_registered("" if status.plugin_registered else sanitize_message(status.error or "no reason was given"))
        return registration.RegistrationStatusResponse()

    def _prepare_resources(
        self, request: dra.NodePrepareResourcesRequest, is_active: IsActive
    ) -> dra.NodePrepareResourcesResponse:
        response = dra.NodePrepareResourcesResponse()
        for claim in request.claims:
            name = ClaimName(claim.namespace, claim.name, claim.uid)
            try:
                containers = self._prepare(name, is_active)
            except StartRefused as error:
                _log.warning("refused to prepare a claim", claim=str(name), claim_uid=claim.uid, reason=str(error))
                response.claims[claim.uid].error = sanitize_message(str(error))
            except Exception as error:  # noqa: BLE001 - logged and answered; the other claims are prepared
                _log.exception("failed to prepare a claim", claim=str(name), claim_uid=claim.uid)
                response.claims[claim.uid].error = sanitize_message(describe_failure(error))
            else:
                response.claims[claim.uid].devices.extend(_device_messages(containers))
        return response

    def _unprepare_resources(
        self, request: dra.NodeUnprepareResourcesRequest, _: IsActive
    ) -> dra.NodeUnprepareResourcesResponse:
        response = dra.NodeUnprepareResourcesResponse()
        for claim in request.claims:
            self._unprepare(ClaimName(claim.namespace, claim.name, claim.uid))
            response.claims[claim.uid].SetInParent()
        return response


def _device_messages(containers: Sequence[ContainerDevices]) -> list[dra.Device]:
    """The devices of a claim. The first one of each request names the CDI device, which has them all."""
    return [
        dra.Device(
            request_names=[container.request],
            pool_name=container.pool,
            device_name=device,
            cdi_device_ids=[] if position else [container.cdi_device],
        )
        for container in containers
        for position, device in enumerate(container.devices)
    ]


class ClaimRegistration:
    """Keeps the DRA plugin in place, in one thread.

    kubelet_dir: the kubelet's root folder.
    find_obstacle: returns why no claim can be prepared at present, None if claims can be prepared.
    unprepare: called with each claim that the kubelet releases.
    """

    def __init__(
        self,
        kubelet_dir: Path,
        prepare: Prepare,
        unprepare: Callable[[ClaimName], None],
        find_obstacle: Callable[[], str | None],
        clock: Clock = SYSTEM,
    ) -> None:
        self._kubelet_dir = kubelet_dir
        self._prepare = prepare
        self._unprepare = unprepare
        self._find_obstacle = find_obstacle
        self._server: _ClaimServer | None = None
        self._problem: str | None = "not registered with the kubelet as DRA plugin yet"
        self._loop = Loop(
            "claims",
            self._serve_if_needed,
            failed="failed to serve claims",
            failures=metrics.THREAD_FAILURES,
            expected=(OSError,),
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
        """Why no claim can be prepared at present, None if claims can be prepared."""
        return self._find_obstacle() or self._problem

    def _serve_if_needed(self) -> None:
        if self._find_obstacle() is not None or (self._server is not None and self._server.has_sockets):
            return
        self._end_server(grace=0.5)
        server = _ClaimServer(self._kubelet_dir, self._prepare, self._unprepare, self._mark_registered)
        server.start()
        self._server = server
        _log.info("serving claims", driver=names.DRIVER)

    def _mark_registered(self, error: str) -> None:
        self._problem = f"the kubelet rejected the DRA plugin {names.DRIVER}: {error}" if error else None
        if error:
            _log.error("the kubelet rejected the DRA plugin", driver=names.DRIVER, error=error)
        else:
            _log.info("registered with the kubelet", driver=names.DRIVER)

    def _end_server(self, grace: float) -> None:
        server, self._server = self._server, None
        if server is not None:
            self._problem = "the sockets of the DRA plugin were removed"
            server.stop(grace)
