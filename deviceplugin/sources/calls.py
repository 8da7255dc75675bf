"""Calls of gRPC methods, by the services' own descriptions, which are generated with the messages (`api`)."""

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
