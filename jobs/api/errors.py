"""What the API answers when it can not do what was asked, in the shape of OpenAI's errors."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from kombu.exceptions import OperationalError
from pydantic import BaseModel
from redis.exceptions import RedisError
from starlette.exceptions import HTTPException

from ...engine.errors import InvalidRequestError
from ...storage.errors import InputError, JobEnded, LedgerUnavailable
from ..embedded import EmbeddedValkeyError
from ..errors import NotRetriable, SpecError
from ..schemas import problem

logger = logging.getLogger(__name__)

# In a list of rows the path down to the column, not through whatever nests in its value.
_MAX_PARAM_PARTS = 3


class ErrorDetail(BaseModel):
    """`param` names the field at fault, `code` the kind of error for programs."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    error: ErrorDetail


class ApiError(HTTPException):
    """A request that is answered with an error."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(status, message)
        self.code = code
        self.param = param


def answer_errors(app: FastAPI) -> None:
    """Have every error leave `app` as an `ErrorBody`."""
    app.exception_handler(HTTPException)(_answer_http)
    app.exception_handler(RequestValidationError)(_answer_invalid)
    for refused in (SpecError, InvalidRequestError, InputError):
        app.exception_handler(refused)(_answer_refused)
    for conflict in (JobEnded, NotRetriable):
        app.exception_handler(conflict)(_answer_conflict)
    for away in (LedgerUnavailable, RedisError, OperationalError, EmbeddedValkeyError):
        app.exception_handler(away)(_answer_away)
    app.exception_handler(Exception)(_answer_fault)


def error_response(
    status: int,
    message: str,
    code: str | None = None,
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    detail = ErrorDetail(message=_encodable(message), type=kind, param=_encodable(param) if param else None, code=code)
    body = ErrorBody(error=detail)
    return JSONResponse(body.model_dump(), status, headers=headers)


def _encodable(text: str) -> str:
    """A request's JSON may name fields with halves of surrogate pairs, which no answer can repeat."""
    return text.encode("utf-8", "backslashreplace").decode()


def _answer_http(request: Request, error: HTTPException) -> JSONResponse:
    code, param = (error.code, error.param) if isinstance(error, ApiError) else (None, None)
    if error.status_code == 400 and code is None:
        # The framework's word for a body that Python's JSON parser gave up on.
        return _invalid_json("it can not be parsed")
    return error_response(error.status_code, str(error.detail), code, param, error.headers)


def _answer_invalid(request: Request, error: RequestValidationError) -> JSONResponse:
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return _invalid_json(f"{first['ctx']['error']} at character {first['loc'][-1]}")
    param = _param(first["loc"])
    message = problem(first)
    return error_response(422, f"{param}: {message}" if param else message, "invalid_value", param)


def _invalid_json(reason: str) -> JSONResponse:
    return error_response(400, f"the body is not valid JSON: {reason}", "invalid_json")


def _param(location: Sequence[Any]) -> str | None:
    """The field's path below the body, the query or the path of a request."""
    return ".".join(map(str, location[1 : 1 + _MAX_PARAM_PARTS])) or None


def _answer_refused(request: Request, error: Exception) -> JSONResponse:
    # These messages are shared with the command line, whose options are the fields of a request.
    param = error.field if isinstance(error, SpecError) else None
    return error_response(422, str(error).replace("--prompt", "prompt"), "invalid_value", param)


def _answer_conflict(request: Request, error: Exception) -> JSONResponse:
    return error_response(409, str(error), "job_state", "job_id")


def _answer_away(request: Request, error: Exception) -> JSONResponse:
    logger.warning("%s %s: %s", request.method, request.url.path, error)
    who = "the ledger" if isinstance(error, LedgerUnavailable) else "Redis"
    return error_response(503, f"{who} does not answer: try again later", "unavailable", headers={"Retry-After": "5"})


def _answer_fault(request: Request, error: Exception) -> JSONResponse:
    return error_response(500, "the server failed: its log says why", "internal_error")
