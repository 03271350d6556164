"""What the HTTP API answers to what is wrong, as gRPC's statuses."""

import logging
from dataclasses import dataclass

import grpc

from ..api.errors import AWAY, FAULT, ApiError, of_later_version, unavailable
from ..api.event_stream import ServerStops
from ..errors import LaterVersion

logger = logging.getLogger(__name__)

_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    404: grpc.StatusCode.NOT_FOUND,
    422: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    499: grpc.StatusCode.CANCELLED,
    501: grpc.StatusCode.UNIMPLEMENTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}


@dataclass(frozen=True)
class Status:
    """How a call ends that fails."""

    code: grpc.StatusCode
    message: str
    trailing_metadata: tuple[tuple[str, str], ...] = ()


def status_of(error: Exception) -> Status:
    """What no client can put right is logged."""
    if isinstance(error, ServerStops):
        error = ApiError(503, "the server stops: send the request again, or go on with Stream", "server_stops")
    if isinstance(error, AWAY):
        logger.warning("gRPC: %s", error)
        error = unavailable(error)
    if isinstance(error, LaterVersion):
        error = of_later_version(error)
    if isinstance(error, ApiError):
        return Status(_CODES.get(error.status_code, grpc.StatusCode.INTERNAL), str(error.detail), _metadata(error))
    logger.error("a gRPC call failed", exc_info=error)
    return Status(grpc.StatusCode.INTERNAL, FAULT, (("error-code", "internal_error"),))


def _metadata(error: ApiError) -> tuple[tuple[str, str], ...]:
    """Values of metadata are ASCII; what a request calls its fields need not be."""
    values = {
        "error-code": error.code,
        "error-param": error.param,
        "retry-after": (error.headers or {}).get("Retry-After"),
    }
    return tuple((name, value.encode("ascii", "backslashreplace").decode()) for name, value in values.items() if value)
