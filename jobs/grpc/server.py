"""The gRPC server, in the event loop of the HTTP server."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc
from fastapi import FastAPI

from .headrace_pb2_grpc import add_HeadraceServicer_to_server
from .health import HealthService
from .health_pb2_grpc import add_HealthServicer_to_server
from .reflection import ReflectionService
from .reflection_pb2_grpc import add_ServerReflectionServicer_to_server
from .service import HeadraceService


@asynccontextmanager
async def grpc_server(
    app: FastAPI, address: str, max_request_bytes: int, grace_seconds: float, on_listening: Callable[[], None]
) -> AsyncIterator[None]:
    """Answers at `address` (HOST:PORT) while open; raises `RuntimeError` where it can not be listened on.

    No call is taken once `app` is leaving; those under way then have `grace_seconds`.
    """
    options = (("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", max_request_bytes))
    server = grpc.aio.server(options=options)
    add_HeadraceServicer_to_server(HeadraceService(app), server)  # type: ignore[no-untyped-call]
    add_HealthServicer_to_server(HealthService(app.state.leaving), server)  # type: ignore[no-untyped-call]
    reflection = ReflectionService()
    add_ServerReflectionServicer_to_server(reflection, server)  # type: ignore[no-untyped-call]
    server.add_generic_rpc_handlers((reflection.earlier_version(),))
    server.add_insecure_port(address)
    await server.start()
    on_listening()
    leaving = asyncio.ensure_future(_stop(server, app.state.leaving, grace_seconds))
    try:
        yield
    finally:
        app.state.leaving.set()
        await leaving


async def _stop(server: grpc.aio.Server, leaving: asyncio.Event, grace_seconds: float) -> None:
    await leaving.wait()
    await server.stop(grace_seconds)
