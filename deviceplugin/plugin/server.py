"""The DevicePlugin gRPC service on one socket: five verbs that know nothing but slots.

Allocate answers at once and from its arguments alone, because the kubelet calls it without a deadline and admits no pod
meanwhile. All thought is in PreStartContainer, whose failure is retried.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import structlog
from google.protobuf.message import DecodeError

from cardwise.core.values.wording import message, quoted
from deviceplugin.api import deviceplugin_v1beta1_pb2 as wire
from deviceplugin.grants import cdi
from deviceplugin.grants.access import Access
from deviceplugin.grants.prestart import Active, StartRefused
from deviceplugin.plugin import slots
from deviceplugin.sources.calls import CHANNEL_OPTIONS

_log = structlog.get_logger(__name__)

SERVICE = "v1beta1.DevicePlugin"
THREADS = 64
OPTIONS = wire.DevicePluginOptions(pre_start_required=True, get_preferred_allocation_available=False)

_SERVER_OPTIONS = (*CHANNEL_OPTIONS, ("grpc.so_reuseport", 0))


class PluginServer:
    """Serves from `start` to `stop`; a new one, with a new socket, for each registration."""

    def __init__(
        self,
        socket: Path,
        *,
        slot_ids: Sequence[str],
        access: Access,
        prestart: Callable[[Sequence[str], Active], object],
    ) -> None:
        self.socket = socket
        self._listing = slots.listing(slot_ids)
        self._known = frozenset(slot_ids)
        self._access = access
        self._prestart = prestart
        self._lock = threading.Lock()
        self._streams: set[threading.Event] = set()  # each is set when its stream is to end
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="grpc")
        self._server = grpc.server(self._threads, options=_SERVER_OPTIONS)
        self._server.add_generic_rpc_handlers((self._handlers(),))

    def start(self) -> None:
        """Raises OSError."""
        try:
            self._server.add_insecure_port(f"unix:{self.socket}")
        except RuntimeError as error:
            raise OSError(f"cannot listen on {self.socket}: {error}") from error
        self._server.start()

    def stop(self, grace: float = 0.0) -> None:
        """Ends the streams, lets calls under way finish for `grace` seconds, and removes the socket."""
        with self._lock:
            for ended in self._streams:
                ended.set()
        self._server.stop(grace).wait()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.socket.unlink(missing_ok=True)

    @property
    def streams(self) -> int:
        """How many ListAndWatch streams are open: the kubelet holds one while it counts on us."""
        with self._lock:
            return sum(not ended.is_set() for ended in self._streams)

    def _handlers(self) -> grpc.GenericRpcHandler:
        # Requests are decoded here, not by gRPC, which would log a traceback for every malformed one.
        def unary(verb: Callable[[Any, Active], Any], kind: Any) -> "grpc.RpcMethodHandler[Any, Any]":
            def handle(body: bytes, context: grpc.ServicerContext) -> Any:
                return _answer(verb, kind, body, context)

            return grpc.unary_unary_rpc_method_handler(handle, response_serializer=_serialize)

        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "GetDevicePluginOptions": unary(lambda *_: OPTIONS, wire.Empty),
                "ListAndWatch": grpc.unary_stream_rpc_method_handler(
                    self._list_and_watch, response_serializer=_serialize
                ),
                "Allocate": unary(self._allocate, wire.AllocateRequest),
                "PreStartContainer": unary(self._pre_start_container, wire.PreStartContainerRequest),
            },
        )

    def _list_and_watch(self, _: bytes, context: grpc.ServicerContext) -> Iterator[wire.ListAndWatchResponse]:
        ended = threading.Event()
        if not context.add_callback(ended.set):
            return
        with self._lock:
            self._streams.add(ended)
        try:
            yield self._listing
            ended.wait()  # slots never change: the stream itself is the message that we are here
        finally:
            with self._lock:
                self._streams.discard(ended)

    def _allocate(self, request: wire.AllocateRequest, _: Active) -> wire.AllocateResponse:
        answer = wire.AllocateResponse()
        for container in request.container_requests:
            unknown = [slot for slot in container.devices_ids if slot not in self._known]
            if unknown:
                raise _Invalid(f"no such share slot: {quoted(unknown)}")
            reply = answer.container_responses.add()
            if self._access is Access.CDI:
                for slot in container.devices_ids:
                    reply.cdi_devices.add(name=cdi.device_name(slot))
        return answer

    def _pre_start_container(
        self, request: wire.PreStartContainerRequest, active: Active
    ) -> wire.PreStartContainerResponse:
        unknown = [slot for slot in request.devices_ids if slot not in self._known]
        if unknown or not request.devices_ids:
            raise _Invalid(f"no such share slot: {quoted(unknown)}" if unknown else "no share slot was named")
        self._prestart(tuple(request.devices_ids), active)
        return wire.PreStartContainerResponse()


class _Invalid(Exception):
    """A request that the kubelet would not make."""


def _answer(verb: Callable[[Any, Active], Any], kind: Any, body: bytes, context: grpc.ServicerContext) -> Any:
    code, why = grpc.StatusCode.INTERNAL, ""
    structlog.contextvars.clear_contextvars()  # the thread's last call was about another pod
    try:
        return verb(kind.FromString(body), context.is_active)
    except DecodeError:
        code, why = grpc.StatusCode.INVALID_ARGUMENT, f"the request is no {kind.DESCRIPTOR.full_name}"
    except _Invalid as error:
        code, why = grpc.StatusCode.INVALID_ARGUMENT, str(error)
    except StartRefused as error:
        code, why = grpc.StatusCode.FAILED_PRECONDITION, str(error)
        _log.warning("a container may not start yet", why=why)
    except Exception as error:  # noqa: BLE001 - the outermost frame of this call: logged and answered
        _log.exception("a call failed")
        why = f"Cardwise's device plugin failed: {quoted(error)}; see its log"
    # Outside of the except clauses, so that gRPC's way of ending a call is not taken for a failure of ours.
    context.abort(code, message(why))  # for the kubelet's event
    return None  # never reached: abort raises


def _serialize(message: Any) -> bytes:
    return bytes(message.SerializeToString())
