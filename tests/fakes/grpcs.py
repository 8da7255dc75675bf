"""Both ends of a gRPC service, by its description: a stub with its methods, and what serves an object that has them."""

from types import SimpleNamespace

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass


def stub(channel: grpc.Channel, service: ServiceDescriptor) -> SimpleNamespace:
    def method(one: MethodDescriptor):
        asked, answer = GetMessageClass(one.input_type), GetMessageClass(one.output_type)
        kind = channel.unary_stream if one.server_streaming else channel.unary_unary
        return kind(f"/{service.full_name}/{one.name}", asked.SerializeToString, answer.FromString)

    return SimpleNamespace(**{one.name: method(one) for one in service.methods})


def serve(server: grpc.Server, service: ServiceDescriptor, served: object) -> None:
    """Methods that `served` has not are unimplemented."""

    def handler(one: MethodDescriptor):
        asked, answer = GetMessageClass(one.input_type), GetMessageClass(one.output_type)
        kind = grpc.unary_stream_rpc_method_handler if one.server_streaming else grpc.unary_unary_rpc_method_handler
        return kind(getattr(served, one.name), asked.FromString, answer.SerializeToString)

    handlers = {one.name: handler(one) for one in service.methods if hasattr(served, one.name)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, handlers),))
