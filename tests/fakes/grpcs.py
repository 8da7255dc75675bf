"""Both ends of a gRPC service, by its descriptor: a stub, and handlers that call the methods of an object."""

from types import SimpleNamespace

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass


def stub(channel: grpc.Channel, service: ServiceDescriptor) -> SimpleNamespace:
    """A client of the service: an object with its methods."""

    def callable_for(method: MethodDescriptor):
        request, response = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
        create = channel.unary_stream if method.server_streaming else channel.unary_unary
        return create(f"/{service.full_name}/{method.name}", request.SerializeToString, response.FromString)

    return SimpleNamespace(**{method.name: callable_for(method) for method in service.methods})


def serve(server: grpc.Server, service: ServiceDescriptor, served: object) -> None:
    """Serve the methods of `served`. Methods that it does not have are unimplemented."""

    def handler_for(method: MethodDescriptor):
        request, response = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
        create = (
            grpc.unary_stream_rpc_method_handler if method.server_streaming else grpc.unary_unary_rpc_method_handler
        )
        return create(getattr(served, method.name), request.FromString, response.SerializeToString)

    handlers = {method.name: handler_for(method) for method in service.methods if hasattr(served, method.name)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, handlers),))
