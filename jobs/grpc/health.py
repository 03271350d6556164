"""The standard health service: for probes, which bring no key."""

import asyncio
from collections.abc import AsyncIterator

import grpc
from grpc.aio import ServicerContext as Context

from .headrace_pb2 import DESCRIPTOR
from .health_pb2 import HealthCheckRequest, HealthCheckResponse
from .health_pb2_grpc import HealthServicer

_SERVICES = ("", *(service.full_name for service in DESCRIPTOR.services_by_name.values()))


class HealthService(HealthServicer):
    """`SERVING` until the server is `leaving`. As `/health`: of what the calls need it says nothing."""

    def __init__(self, leaving: asyncio.Event) -> None:
        self._leaving = leaving

    async def Check(self, request: HealthCheckRequest, context: Context) -> HealthCheckResponse:
        """The status now."""
        if request.service not in _SERVICES:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"there is no service {request.service!r}")
        return self._response()

    async def Watch(self, request: HealthCheckRequest, context: Context) -> AsyncIterator[HealthCheckResponse]:
        """The status now, and that the server leaves."""
        if request.service not in _SERVICES:
            yield HealthCheckResponse(status=HealthCheckResponse.SERVICE_UNKNOWN)
        else:
            yield self._response()
        await self._leaving.wait()
        yield HealthCheckResponse(status=HealthCheckResponse.NOT_SERVING)

    def _response(self) -> HealthCheckResponse:
        is_leaving = self._leaving.is_set()
        return HealthCheckResponse(
            status=HealthCheckResponse.NOT_SERVING if is_leaving else HealthCheckResponse.SERVING
        )
