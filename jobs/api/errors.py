"""What the API answers when it can not do what was asked, in the shape of OpenAI's errors."""

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError, WebSocketRequestValidationError
from fastapi.responses import JSONResponse
from kombu.exceptions import OperationalError
from pydantic import BaseModel
from redis.exceptions import RedisError, ResponseError
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import Receive, Scope, Send

from ...engine.errors import InvalidRequestError
from ...storage.errors import (
    InputError,
    JobEnded,
    LedgerUnavailable,
    ManifestDamaged,
    OutputNotEmpty,
    PartDamaged,
    PartMissing,
    SinkError,
    SinkUnavailable,
    SpoolDamaged,
    StoreUnavailable,
    UnknownJob,
)
from ...storage.ledger.quotas import QuotaExceeded
from ..embedded.valkey import EmbeddedValkeyError
from ..errors import LaterVersion, NotRetriable, SpecError
from ..spec.problems import problem
from ..spec.sampling import SamplingSpec
from .request_ids import request_id_of
from .wording import with_fields

logger = logging.getLogger(__name__)

# In a list of rows the path down to the column, not through whatever nests in its value.
_MAX_PARAM_PARTS = 3
# What proxies call an answer that nobody is there to read.
CLIENT_CLOSED_REQUEST = 499
# The header of what may be well again in a while.
RETRY_SOON = {"Retry-After": "5"}
# When to ask again whether a live request has ended.
LIVE_RETRY_SECONDS = 1.0
# When to ask again whether one of the jobs that are in the way has ended.
_JOB_RETRY_SECONDS = 15.0
# What is raised where the ledger, Redis, a sink or the store of a job's output does not answer.
AWAY = (LedgerUnavailable, StoreUnavailable, RedisError, OperationalError, EmbeddedValkeyError)
_METHODS = ("DELETE", "GET", "HEAD", "PATCH", "POST", "PUT")
FAULT = "the server failed: its log says why"


class ErrorDetail(BaseModel):
    """`param` names the field at fault, `code` the kind of error for programs."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    error: ErrorDetail


class ApiError(HTTPException):
    """A request that is answered with an error. `kind` is the error's `type` where its status does not say it."""

    kind: str | None = None

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(status, message)
        self.code = code
        self.param = param


class RateLimited(ApiError):
    """Too much, of what `kind` says: "requests" or "tokens". `retry_after`: seconds; None where it always will be."""

    def __init__(self, kind: str, message: str, retry_after: float | None = None) -> None:
        super().__init__(429, message, "rate_limit_exceeded")
        self.kind = kind
        if retry_after is not None:
            self.headers = {"Retry-After": str(max(1, math.ceil(retry_after)))}


def too_many_open() -> RateLimited:
    """What a client is told where as many live requests of a model are open as may be."""
    return RateLimited("requests", "too many requests wait for this model: try again soon", LIVE_RETRY_SECONDS)


def answer_errors(app: FastAPI) -> None:
    """Have every error leave `app` as an `ErrorBody`."""
    app.exception_handler(HTTPException)(_answer_http)
    app.exception_handler(RequestValidationError)(_answer_invalid)
    app.exception_handler(WebSocketRequestValidationError)(_answer_invalid)
    for refused in (SpecError, InvalidRequestError, InputError, SinkError):
        app.exception_handler(refused)(_answer_refused)
    # The latter are no fault of the server's program: somebody has removed or damaged what the job has written.
    for conflict in (JobEnded, NotRetriable, OutputNotEmpty, ManifestDamaged, PartMissing, PartDamaged, SpoolDamaged):
        app.exception_handler(conflict)(_answer_conflict)
    app.exception_handler(UnknownJob)(_answer_gone)
    app.exception_handler(QuotaExceeded)(_answer_over_quota)
    app.exception_handler(LaterVersion)(_answer_later)
    for away in AWAY:
        app.exception_handler(away)(_answer_away)
    app.router.default = _unknown_path
    app.exception_handler(Exception)(_answer_fault)


def error_response(
    status: int,
    message: str,
    code: str | None = None,
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
    kind: str | None = None,
) -> JSONResponse:
    return JSONResponse(_body(status, message, code, param, kind), status, headers=headers)


def error_body(error: ApiError) -> dict[str, Any]:
    """What says so where no status can: within a stream, or in a file."""
    return _body(error.status_code, str(error.detail), error.code, error.param, error.kind)


def _body(status: int, message: str, code: str | None, param: str | None, kind: str | None) -> dict[str, Any]:
    kind = kind or ("server_error" if status >= 500 else "invalid_request_error")
    detail = ErrorDetail(message=_encodable(message), type=kind, param=_encodable(param) if param else None, code=code)
    return ErrorBody(error=detail).model_dump()


def _encodable(text: str) -> str:
    """A request's JSON may name fields with halves of surrogate pairs, which no answer can repeat."""
    return text.encode("utf-8", "backslashreplace").decode()


async def _unknown_path(scope: Scope, receive: Receive, send: Send) -> None:
    """The framework's own closes a WebSocket, which clients see as 403."""
    raise HTTPException(404)


def _answer_http(request: Request, error: HTTPException) -> JSONResponse:
    code, param = (error.code, error.param) if isinstance(error, ApiError) else (None, None)
    if error.status_code == 400 and code is None:
        # The framework's word for a body that Python's JSON parser gave up on.
        return _invalid_json(request, "it can not be parsed")
    kind = error.kind if isinstance(error, ApiError) else None
    message, headers = str(error.detail), error.headers
    if not isinstance(error, ApiError) and error.status_code in (404, 405):
        # The framework's word is the status again. As OpenAI says it, so that a client sees which of its URLs is wrong.
        message = f"Invalid URL ({request.scope.get('method', 'WebSocket')} {request.url.path})"
    if error.status_code == 405:
        headers = {"Allow": ", ".join(_allowed_methods(request))}
    return error_response(error.status_code, message, code, param, headers, kind)


def _allowed_methods(request: Request) -> list[str]:
    """Those of all routes of a path: the framework names those of the first."""

    def is_allowed(method: str) -> bool:
        asked = {**request.scope, "method": method}
        return any(route.matches(asked)[0] is Match.FULL for route in request.app.router.routes)

    return [method for method in _METHODS if is_allowed(method)]


def _answer_invalid(request: Request, error: RequestValidationError | WebSocketRequestValidationError) -> JSONResponse:
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return _invalid_json(request, f"{first['ctx']['error']} at character {first['loc'][-1]}")
    param = _param(first["loc"])
    message = f"{param or 'the body'}: {problem(first)}"
    if first["type"] == "extra_forbidden" and param in SamplingSpec.model_fields:
        # Where OpenAI's requests have it.
        message += f': say it in "sampling", such as {{"sampling": {{"{param}": …}}}}'
    return error_response(422, message, "invalid_value", param)


def _invalid_json(request: Request, reason: str) -> JSONResponse:
    if (coding := request.headers.get("content-encoding", "identity")) != "identity":
        message = f"bodies are not unpacked here: send it without Content-Encoding: {coding}"
        return error_response(415, message, "encoded_body")
    return error_response(400, f"the body is not valid JSON: {reason}", "invalid_json")


def _param(location: Sequence[Any]) -> str | None:
    """The field's path below the body, the query or the path of a request."""
    return ".".join(map(str, location[1 : 1 + _MAX_PARAM_PARTS])) or None


def _answer_refused(request: Request, error: Exception) -> JSONResponse:
    param = error.field if isinstance(error, SpecError) else None
    return error_response(422, with_fields(error), "invalid_value", param)


def _answer_conflict(request: Request, error: Exception) -> JSONResponse:
    return error_response(409, with_fields(error), "job_state", "job_id")


def _answer_gone(request: Request, error: Exception) -> JSONResponse:
    # Somebody has deleted it since it was looked up.
    return error_response(404, "the job does not exist any more", "job_not_found", "job_id")


def _answer_over_quota(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, QuotaExceeded)
    kind = "tokens" if error.limit == "queued_tokens" else "requests"
    if not error.fits:
        advice = "ask for fewer rows at a time, or for shorter answers (max_tokens)"
        return _answer_http(request, RateLimited(kind, f"{error}: {advice}"))
    return _answer_http(request, RateLimited(kind, f"{error}: try again when others have ended", _JOB_RETRY_SECONDS))


def _answer_away(request: Request, error: Exception) -> JSONResponse:
    logger.warning("%s %s: %s", request.method, request.url.path, error)
    return _answer_http(request, unavailable(error))


def unavailable(error: Exception) -> ApiError:
    """What a client is told of one of the errors `AWAY` (503)."""
    if isinstance(error, SinkUnavailable):
        # The client has named it, and a port may be the wrong one.
        return try_later(str(error), "sink.url")
    who = "the ledger" if isinstance(error, LedgerUnavailable) else "Redis"
    if isinstance(error, StoreUnavailable):
        who = "the store of the job's output"
    return try_later(f"{who} {'takes nothing in' if isinstance(error, ResponseError) else 'does not answer'}")


def try_later(problem: str, param: str | None = None) -> ApiError:
    """503, for what may be well again in a while."""
    told = ApiError(503, f"{problem}: try again later", "unavailable", param)
    told.headers = RETRY_SOON
    return told


def _answer_later(request: Request, error: Exception) -> JSONResponse:
    return _answer_http(request, of_later_version(error))


def of_later_version(error: Exception) -> ApiError:
    """What a client is told of a `LaterVersion` (501): another server of ours may know what this one does not."""
    return ApiError(501, str(error), "later_version")


def _answer_fault(request: Request, error: Exception) -> JSONResponse:
    # The traceback follows in the log.
    logger.error("%s %s failed: %s", request.method, request.url.path, request_id_of(request))
    return error_response(500, FAULT, "internal_error")
