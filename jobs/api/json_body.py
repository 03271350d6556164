"""Requests whose body has to be said to be JSON."""

from fastapi import Request

from .errors import ApiError


def media_type(request: Request) -> str:
    """What the body is said to be, without its parameters."""
    return str(request.headers.get("content-type", "").partition(";")[0].strip().lower())


def expect_json(request: Request) -> None:
    """Raises `ApiError` (415)."""
    if media_type(request) != "application/json":
        raise ApiError(415, "send JSON, with the header Content-Type: application/json", "not_json")
