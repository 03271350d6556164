"""Requests whose body has to be said to be JSON."""

from fastapi import Request

from .errors import ApiError


def expect_json(request: Request) -> None:
    """Raises `ApiError` (415)."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, "send JSON, with the header Content-Type: application/json", "not_json")
