"""Serves the methods of one gRPC service on a Unix socket, and turns exceptions into statuses for the kubelet."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import structlog
from google.protobuf.message import DecodeError

from cardwise.core.values.wording import quote_text, sanitize_message
from deviceplugin.grants.granting import IsActive, StartRefused
from deviceplugin.sources.calls import CHANNEL_OPTIONS

_log = structlog.get_logger(__name__)

Method = Callable[[Any, IsActive], Any]
"""Takes a request and a function that returns whether the kubelet still waits; returns the response."""

_SERVER_OPTIONS = (*CHANNEL_OPTIONS, ("grpc.so_reuseport", 0))


class InvalidRequest(Exception):
    """A request that a correct kubelet does not send."""


class SocketServer:
    """A gRPC server of one service on a Unix socket, from `start` to `stop`.

    service: the full name of the service.
    handlers: the handlers of its methods, by name.
    """

    def __init__(
        self, socket: Path, service: str, handlers: Mapping[str, "grpc.RpcMethodHandler[Any, Any]"], max_threads: int
    ) -> None:
        self.socket = socket
        self._threads = ThreadPoolExecutor(max_threads, thread_name_prefix="grpc")
        self._server = grpc.server(self._threads, options=_SERVER_OPTIONS)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, dict(handlers)),))

    def start(self) -> None:
        """Listen on the socket. Raises OSError."""
        try:
            self._server.add_insecure_port(f"unix:{self.socket}")
        except RuntimeError as error:
            raise OSError(f"cannot listen on {self.socket}: {error}") from error
        self._server.start()

    def stop(self, grace: float = 0.0) -> None:
        """Wait up to `grace` seconds for running calls, and remove the socket."""
        self._server.stop(grace).wait()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.socket.unlink(missing_ok=True)


def unary(method: Method, request_type: Any) -> "grpc.RpcMethodHandler[Any, Any]":
    """The handler of a unary method."""

    # Requests are decoded here: gRPC would log a traceback for each malformed request.
    def handle(body: bytes, context: grpc.ServicerContext) -> Any:
        return _handle_call(method, request_type, body, context)

    return grpc.unary_unary_rpc_method_handler(handle, response_serializer=serialize)


def serialize(message: Any) -> bytes:
    return bytes(message.SerializeToString())


def describe_failure(error: Exception) -> str:
    """The text of an unexpected exception for the kubelet, which shows it in an event."""
    return f"Cardwise's device plugin failed: {quote_text(error)}; see its log"


def _handle_call(method: Method, request_type: Any, body: bytes, context: grpc.ServicerContext) -> Any:
    code, reason = grpc.StatusCode.INTERNAL, ""
    structlog.contextvars.clear_contextvars()  # the thread's previous call concerned another pod
    try:
        return method(request_type.FromString(body), context.is_active)
    except DecodeError:
        code, reason = grpc.StatusCode.INVALID_ARGUMENT, f"the request is not a {request_type.DESCRIPTOR.full_name}"
    except InvalidRequest as error:
        code, reason = grpc.StatusCode.INVALID_ARGUMENT, str(error)
    except StartRefused as error:
        code, reason = grpc.StatusCode.FAILED_PRECONDITION, str(error)
        _log.warning("refused to start a container", reason=reason)
    except Exception as error:  # noqa: BLE001 - the outermost frame of this call: logged and answered
        _log.exception("failed to handle a call of the kubelet")
        reason = describe_failure(error)
    # Outside the except clauses, since `abort` itself raises.
    context.abort(code, sanitize_message(reason))  # the kubelet shows this text in an event
    return None  # never reached: abort raises
