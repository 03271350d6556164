"""What tools learn of the calls without a `.proto` file, over a real channel."""

from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool

from headrace.jobs.grpc.reflection_pb2 import ServerReflectionRequest as Request
from headrace.jobs.grpc.reflection_pb2 import ServerReflectionResponse as Response

from ..api_server import ApiServer

SERVICES = ["headrace.v1.Headrace", "grpc.health.v1.Health", "grpc.reflection.v1.ServerReflection"]


def ask(api: ApiServer, version: str, *requests: Request) -> list[Response]:
    with grpc.insecure_channel(api.grpc) as channel:
        info: Any = channel.stream_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
            request_serializer=Request.SerializeToString,
            response_deserializer=Response.FromString,
        )
        return list(info(iter(requests), timeout=60))


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
def test_all_that_is_needed_for_a_call(api: ApiServer, version: str) -> None:
    listing = Request(host="here", list_services="*")
    (listed,) = ask(api, version, listing)
    assert [service.name for service in listed.list_services_response.service] == SERVICES
    assert (listed.valid_host, listed.original_request) == ("here", listing)
    pool = DescriptorPool()
    for response in ask(api, version, *(Request(file_containing_symbol=name) for name in SERVICES)):
        (data,) = response.file_descriptor_response.file_descriptor_proto
        pool.Add(FileDescriptorProto.FromString(data))
    generate = pool.FindServiceByName("headrace.v1.Headrace").methods_by_name["Generate"]
    assert "guided_choice" in generate.input_type.fields_by_name
    assert generate.output_type.full_name == "headrace.v1.GenerateResponse"


def test_a_file_by_its_name_and_by_what_is_in_it(api: ApiServer) -> None:
    symbols = ("headrace.v1.Headrace.Generate", "headrace.v1.Usage", "headrace.v1.GenerateRequest.LogitBiasEntry")
    requests = [Request(file_containing_symbol=symbol) for symbol in symbols]
    by_name, *by_symbol = ask(api, "v1", Request(file_by_filename="headrace/jobs/grpc/headrace.proto"), *requests)
    assert by_name.file_descriptor_response.file_descriptor_proto
    assert {str(found.file_descriptor_response) for found in by_symbol} == {str(by_name.file_descriptor_response)}


def test_what_is_not_there_is_not_found_and_the_next_is_answered(api: ApiServer) -> None:
    *missing, found = ask(
        api,
        "v1",
        Request(file_by_filename="other.proto"),
        Request(file_containing_symbol="headrace.v1.Other"),
        Request(all_extension_numbers_of_type="headrace.v1.Usage"),
        Request(),
        Request(file_containing_symbol="headrace.v1.Usage"),
    )
    codes = [response.error_response.error_code for response in missing]
    assert codes == [grpc.StatusCode.NOT_FOUND.value[0]] * 4
    assert found.HasField("file_descriptor_response")
