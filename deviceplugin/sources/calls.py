"""Makes unary gRPC calls, using the service descriptors that are generated with the messages (`deviceplugin.api`)."""

import threading
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

# With hundreds of pods on the node, a response exceeds gRPC's default of 4 MiB (it has one entry per device ID).
CHANNEL_OPTIONS = (("grpc.max_receive_message_length", 64 << 20), ("grpc.enable_http_proxy", 0))


def call_unary(channel: grpc.Channel, service: ServiceDescriptor, method: str, message: Any, timeout: float) -> Any:
    """Call a unary method and return its response. `timeout` in seconds. Raises grpc.RpcError."""
    response_type = GetMessageClass(service.methods_by_name[method].output_type)
    rpc = channel.unary_unary(
        f"/{service.full_name}/{method}", type(message).SerializeToString, response_type.FromString
    )
    return rpc(message, timeout=timeout)


class CallFailed(Exception):
    """A gRPC call failed; the message says why. `code` is None if the failure came before the call."""

    def __init__(self, reason: str, code: grpc.StatusCode | None = None) -> None:
        super().__init__(reason)
        self.code = code


class GrpcCaller:
    """Calls the methods of one service on a Unix socket, over one channel. Thread-safe."""

    def __init__(self, socket: Path, service: ServiceDescriptor) -> None:
        self._socket = socket
        self._service = service
        self._lock = threading.Lock()
        self._channel: grpc.Channel | None = None

    def call(self, method: str, message: Any, timeout: float) -> Any:
        """Call a unary method and return its response. `timeout` in seconds. Raises CallFailed."""
        with self._lock:
            if self._channel is None:
                self._channel = grpc.insecure_channel(f"unix:{self._socket}", options=CHANNEL_OPTIONS)
            channel = self._channel
        try:
            return call_unary(channel, self._service, method, message, timeout)
        except ValueError as error:  # another thread has closed the channel
            raise CallFailed(str(error)) from error
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.UNAVAILABLE:
                self.close()  # another process may listen on the socket now; gRPC would wait before it reconnects
            raise CallFailed(f"{error.code().name}: {error.details()}", error.code()) from error

    def close(self) -> None:
        with self._lock:
            if self._channel is not None:
                self._channel.close()
                self._channel = None
