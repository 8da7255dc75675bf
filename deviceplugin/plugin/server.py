"""The DevicePlugin gRPC service on one socket. Its methods receive slots only.

Allocate returns at once and uses only its arguments. During the call the kubelet admits no other pod, and the call has
no deadline. PreStartContainer makes all decisions, since the kubelet retries it.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import structlog
from google.protobuf.message import DecodeError

from cardwise.core.values.wording import quote_text, sanitize_message
from deviceplugin.api import deviceplugin_v1beta1_pb2 as wire
from deviceplugin.grants import cdi
from deviceplugin.grants.access import Access
from deviceplugin.grants.prestart import IsActive, StartRefused
from deviceplugin.plugin import slots
from deviceplugin.sources.calls import CHANNEL_OPTIONS

_log = structlog.get_logger(__name__)

SERVICE = "v1beta1.DevicePlugin"
MAX_THREADS = 64
PLUGIN_OPTIONS = wire.DevicePluginOptions(pre_start_required=True, get_preferred_allocation_available=False)

_SERVER_OPTIONS = (*CHANNEL_OPTIONS, ("grpc.so_reuseport", 0))


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
        self.socket = socket
        self._device_list = slots.build_device_list(slot_ids)
        self._slot_ids = frozenset(slot_ids)
        self._access = access
        self._prestart = prestart
        self._lock = threading.Lock()
        self._streams: set[threading.Event] = set()  # setting an event ends its stream
        self._threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="grpc")
        self._server = grpc.server(self._threads, options=_SERVER_OPTIONS)
        self._server.add_generic_rpc_handlers((self._handlers(),))

    def start(self) -> None:
        """Listen on the socket. Raises OSError."""
        try:
            self._server.add_insecure_port(f"unix:{self.socket}")
        except RuntimeError as error:
            raise OSError(f"cannot listen on {self.socket}: {error}") from error
        self._server.start()

    def stop(self, grace: float = 0.0) -> None:
        """End the streams, wait up to `grace` seconds for running calls, and remove the socket."""
        with self._lock:
            for end_event in self._streams:
                end_event.set()
        self._server.stop(grace).wait()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.socket.unlink(missing_ok=True)

    @property
    def streams(self) -> int:
        """The number of open ListAndWatch streams: the kubelet keeps one while the plugin is registered."""
        with self._lock:
            return sum(not end_event.is_set() for end_event in self._streams)

    def _handlers(self) -> grpc.GenericRpcHandler:
        # Requests are decoded here: gRPC would log a traceback for each malformed request.
        def unary(method: Callable[[Any, IsActive], Any], request_type: Any) -> "grpc.RpcMethodHandler[Any, Any]":
            def handle(body: bytes, context: grpc.ServicerContext) -> Any:
                return _handle_call(method, request_type, body, context)

            return grpc.unary_unary_rpc_method_handler(handle, response_serializer=_serialize)

        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "GetDevicePluginOptions": unary(lambda *_: PLUGIN_OPTIONS, wire.Empty),
                "ListAndWatch": grpc.unary_stream_rpc_method_handler(
                    self._list_and_watch, response_serializer=_serialize
                ),
                "Allocate": unary(self._allocate, wire.AllocateRequest),
                "PreStartContainer": unary(self._pre_start_container, wire.PreStartContainerRequest),
            },
        )

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
                raise _InvalidRequest(f"no such share slot: {quote_text(unknown_slots)}")
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
            raise _InvalidRequest(
                f"no such share slot: {quote_text(unknown_slots)}" if unknown_slots else "no share slot was named"
            )
        self._prestart(tuple(request.devices_ids), is_active)
        return wire.PreStartContainerResponse()


class _InvalidRequest(Exception):
    """A request that a correct kubelet does not send."""


def _handle_call(
    method: Callable[[Any, IsActive], Any], request_type: Any, body: bytes, context: grpc.ServicerContext
) -> Any:
    code, reason = grpc.StatusCode.INTERNAL, ""
    structlog.contextvars.clear_contextvars()  # the thread's previous call concerned another pod
    try:
        return method(request_type.FromString(body), context.is_active)
    except DecodeError:
        code, reason = grpc.StatusCode.INVALID_ARGUMENT, f"the request is not a {request_type.DESCRIPTOR.full_name}"
    except _InvalidRequest as error:
        code, reason = grpc.StatusCode.INVALID_ARGUMENT, str(error)
    except StartRefused as error:
        code, reason = grpc.StatusCode.FAILED_PRECONDITION, str(error)
        _log.warning("refused to start a container", reason=reason)
    except Exception as error:  # noqa: BLE001 - the outermost frame of this call: logged and answered
        _log.exception("failed to handle a call of the kubelet")
        reason = f"Cardwise's device plugin failed: {quote_text(error)}; see its log"
    # Outside the except clauses, since `abort` itself raises.
    context.abort(code, sanitize_message(reason))  # the kubelet shows this text in an event
    return None  # never reached: abort raises


def _serialize(message: Any) -> bytes:
    return bytes(message.SerializeToString())
