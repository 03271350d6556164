"""The standard reflection service: for tools that know no `.proto` file, and bring no key."""

from collections.abc import AsyncIterator

import grpc
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from grpc.aio import ServicerContext as Context

from . import headrace_pb2, health_pb2, reflection_pb2
from .reflection_pb2 import (
    ErrorResponse,
    FileDescriptorResponse,
    ListServiceResponse,
    ServerReflectionRequest,
    ServerReflectionResponse,
    ServiceResponse,
)
from .reflection_pb2_grpc import ServerReflectionServicer

# None of them imports another.
_FILES = {module.DESCRIPTOR.name: module.DESCRIPTOR for module in (headrace_pb2, health_pb2, reflection_pb2)}
_SERVICES = {service.full_name: service for file in _FILES.values() for service in file.services_by_name.values()}
# Not the process' own pool, which has the files of other packages too. It takes no call for a symbol.
_POOL = DescriptorPool()
for _file in _FILES.values():
    _POOL.AddSerializedFile(_file.serialized_pb)
_CALLS = {call.full_name: service.file for service in _SERVICES.values() for call in service.methods}
# What it was called before: some tools ask for nothing else. The messages are the same.
_EARLIER_NAME = "grpc.reflection.v1alpha.ServerReflection"


class ReflectionService(ServerReflectionServicer):
    """Tells of the services here, their calls and their messages. Extensions of messages there are none."""

    async def ServerReflectionInfo(
        self, request_iterator: AsyncIterator[ServerReflectionRequest], context: Context
    ) -> AsyncIterator[ServerReflectionResponse]:
        """What each request asks for, or `NOT_FOUND`."""
        async for request in request_iterator:
            response = _response(request)
            response.valid_host = request.host
            response.original_request.CopyFrom(request)
            yield response

    def earlier_version(self) -> grpc.GenericRpcHandler:
        """The same under its earlier name."""
        info = grpc.stream_stream_rpc_method_handler(
            self.ServerReflectionInfo,
            request_deserializer=ServerReflectionRequest.FromString,
            response_serializer=ServerReflectionResponse.SerializeToString,
        )
        return grpc.method_handlers_generic_handler(_EARLIER_NAME, {"ServerReflectionInfo": info})


def _response(request: ServerReflectionRequest) -> ServerReflectionResponse:
    asked = request.WhichOneof("message_request")
    if asked == "list_services":
        services = ListServiceResponse(service=[ServiceResponse(name=name) for name in _SERVICES])
        return ServerReflectionResponse(list_services_response=services)
    file = None
    if asked == "file_by_filename":
        file = _FILES.get(request.file_by_filename)
    elif asked == "file_containing_symbol":
        file = _file_of(request.file_containing_symbol)
    if file is None:
        code, _ = grpc.StatusCode.NOT_FOUND.value
        return ServerReflectionResponse(error_response=ErrorResponse(error_code=code, error_message="not found"))
    found = FileDescriptorResponse(file_descriptor_proto=[file.serialized_pb])
    return ServerReflectionResponse(file_descriptor_response=found)


def _file_of(symbol: str) -> FileDescriptor | None:
    """The file that says what a service, a call, a message or the like is."""
    if symbol in _CALLS:
        return _CALLS[symbol]
    try:
        file: FileDescriptor = _POOL.FindFileContainingSymbol(symbol)
    except KeyError:
        return None
    return file
