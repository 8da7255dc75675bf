"""Calls of gRPC methods, by the services' own descriptions, which are generated with the messages (`api`)."""

import threading
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

# Answers of a node with hundreds of pods pass gRPC's 4 MiB (one entry per device ID).
CHANNEL_OPTIONS = (("grpc.max_receive_message_length", 64 << 20), ("grpc.enable_http_proxy", 0))


def call(channel: grpc.Channel, service: ServiceDescriptor, method: str, message: Any, timeout: float) -> Any:
    """The answer of a method that takes one message and gives one. Raises grpc.RpcError."""
    answer = GetMessageClass(service.methods_by_name[method].output_type)
    ask = channel.unary_unary(f"/{service.full_name}/{method}", type(message).SerializeToString, answer.FromString)
    return ask(message, timeout=timeout)


class CallFailed(Exception):
    """There is no answer; the message says why. `code` is None where nobody was asked."""

    def __init__(self, why: str, code: grpc.StatusCode | None = None) -> None:
        super().__init__(why)
        self.code = code


class Caller:
    """Calls of a service on a socket, by one channel. Thread-safe."""

    def __init__(self, socket: Path, service: ServiceDescriptor) -> None:
        self._socket = socket
        self._service = service
        self._lock = threading.Lock()
        self._channel: grpc.Channel | None = None

    def call(self, method: str, message: Any, timeout: float) -> Any:
        """Raises CallFailed."""
        with self._lock:
            if self._channel is None:
                self._channel = grpc.insecure_channel(f"unix:{self._socket}", options=CHANNEL_OPTIONS)
            channel = self._channel
        try:
            return call(channel, self._service, method, message, timeout)
        except ValueError as error:  # another thread has closed the channel
            raise CallFailed(str(error)) from error
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.UNAVAILABLE:
                self.close()  # somebody else may be behind the path now, and gRPC would wait before it looks
            raise CallFailed(f"{error.code().name}: {error.details()}", error.code()) from error

    def close(self) -> None:
        with self._lock:
            if self._channel is not None:
                self._channel.close()
                self._channel = None
