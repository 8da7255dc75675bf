"""The DevicePlugin gRPC service on one socket. Its methods receive slots only.

Allocate returns at once and uses only its arguments. During the call the kubelet admits no other pod, and the call has
no deadline. PreStartContainer makes all decisions, since the kubelet retries it.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc

from cardwise.core.values.wording import quote_text
from deviceplugin.api import deviceplugin_v1beta1_pb2 as wire
from deviceplugin.grants import cdi
from deviceplugin.grants.access import Access
from deviceplugin.grants.granting import IsActive
from deviceplugin.plugin import slots
from deviceplugin.plugin.serving import InvalidRequest, SocketServer, serialize, unary

SERVICE = "v1beta1.DevicePlugin"
MAX_THREADS = 64
PLUGIN_OPTIONS = wire.DevicePluginOptions(pre_start_required=True, get_preferred_allocation_available=False)


class PluginServer:
    """Serves one registration, from `start` to `stop`."""

    def __init__(
        self,
        socket: Path,
        *,
        slot_ids: Sequence[str],
        access: Access,
        prestart: Callable[[Sequence[str], IsActive], object],
    ) -> None:
        self._device_list = slots.build_device_list(slot_ids)
        self._slot_ids = frozenset(slot_ids)
        self._access = access
        self._prestart = prestart
        self._lock = threading.Lock()
        self._streams: set[threading.Event] = set()  # setting an event ends its stream
        self._server = SocketServer(socket, SERVICE, self.handlers(), MAX_THREADS)

    @property
    def socket(self) -> Path:
        return self._server.socket

    def start(self) -> None:
        """Listen on the socket. Raises OSError."""
        self._server.start()

    def stop(self, grace: float = 0.0) -> None:
        """End the streams, wait up to `grace` seconds for running calls, and remove the socket."""
        with self._lock:
            for end_event in self._streams:
                end_event.set()
        self._server.stop(grace)

    @property
    def streams(self) -> int:
        """The number of open ListAndWatch streams: the kubelet keeps one while the plugin is registered."""
        with self._lock:
            return sum(not end_event.is_set() for end_event in self._streams)

    def handlers(self) -> dict[str, "grpc.RpcMethodHandler[Any, Any]"]:
        """The handlers of the service's methods, by name."""
        return {
            "GetDevicePluginOptions": unary(lambda *_: PLUGIN_OPTIONS, wire.Empty),
            "ListAndWatch": grpc.unary_stream_rpc_method_handler(self._list_and_watch, response_serializer=serialize),
            "Allocate": unary(self._allocate, wire.AllocateRequest),
            "PreStartContainer": unary(self._pre_start_container, wire.PreStartContainerRequest),
        }

    def _list_and_watch(self, _: bytes, context: grpc.ServicerContext) -> Iterator[wire.ListAndWatchResponse]:
        end_event = threading.Event()
        if not context.add_callback(end_event.set):
            return
        with self._lock:
            self._streams.add(end_event)
        try:
            yield self._device_list
            end_event.wait()  # slots never change: the open stream itself tells the kubelet that the plugin is alive
        finally:
            with self._lock:
                self._streams.discard(end_event)

    def _allocate(self, request: wire.AllocateRequest, _: IsActive) -> wire.AllocateResponse:
        response = wire.AllocateResponse()
        for container in request.container_requests:
            unknown_slots = [slot for slot in container.devices_ids if slot not in self._slot_ids]
            if unknown_slots:
                raise InvalidRequest(f"no such share slot: {quote_text(unknown_slots)}")
            container_response = response.container_responses.add()
            if self._access is Access.CDI:
                for slot in container.devices_ids:
                    container_response.cdi_devices.add(name=cdi.device_name(slot))
        return response

    def _pre_start_container(
        self, request: wire.PreStartContainerRequest, is_active: IsActive
    ) -> wire.PreStartContainerResponse:
        unknown_slots = [slot for slot in request.devices_ids if slot not in self._slot_ids]
        if unknown_slots or not request.devices_ids:
            raise InvalidRequest(
                f"no such share slot: {quote_text(unknown_slots)}" if unknown_slots else "no share slot was named"
            )
        self._prestart(tuple(request.devices_ids), is_active)
        return wire.PreStartContainerResponse()
