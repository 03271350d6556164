"""Batches in requests and answers."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, Field

from ....storage.ledger.batch_records import BatchRecord, BatchState
from ....storage.ledger.records import Progress
from ...spec.durations import parse_duration
from ..job_requests import WebhookRequest
from ..schemas import Name
from .file_schemas import ExpiresAfter
from .request_body import Body

# Ten years: what is longer is a slip, and more than a float can add to a time of day.
_MAX_WINDOW_SECONDS = 10 * 365 * 86400


def _window(text: str) -> str:
    if re.fullmatch(r"\d{1,9}[smhd]", text, re.ASCII) is None or not int(text[:-1]):
        raise ValueError("must be a whole number and s, m, h or d, such as 24h")
    if parse_duration("completion_window", text) > _MAX_WINDOW_SECONDS:
        raise ValueError("must be at most 3650d")
    return text


Metadata = Annotated[
    dict[Annotated[Name, Field(max_length=64)], Annotated[Name, Field(max_length=512)]], Field(max_length=16)
]


class BatchRequest(Body):
    """A batch of the requests in an uploaded file. `completion_window`: any whole number of s, m, h or d.

    `webhook`: where its end is to be told, as `batch.completed`, `batch.failed`, `batch.expired` or `batch.cancelled`.
    """

    input_file_id: Name
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses"]
    completion_window: Annotated[str, AfterValidator(_window), Field(examples=["24h"])]
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None
    webhook: WebhookRequest | None = None

    @property
    def within_seconds(self) -> float:
        return parse_duration("completion_window", self.completion_window)


class LineErrorBody(BaseModel):
    """Why a batch was not begun; `line` counts from 1."""

    code: str
    line: int | None
    message: str
    param: str | None


class LineErrors(BaseModel):
    object: Literal["list"] = "list"
    data: list[LineErrorBody]


class RequestCounts(BaseModel):
    """`failed`: those that the error file tells of, begun or not."""

    total: int
    completed: int
    failed: int


class InputDetails(BaseModel):
    cached_tokens: int


class OutputDetails(BaseModel):
    reasoning_tokens: int = 0


class BatchUsage(BaseModel):
    """Of the requests that were answered so far."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class BatchBody(BaseModel):
    """OpenAI's `Batch`. Times are Unix seconds. `job_id`: the job that does the work, for the routes under `/jobs`."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    model: str | None
    errors: LineErrors | None
    input_file_id: str
    completion_window: str
    status: BatchState
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    usage: BatchUsage | None
    metadata: dict[str, str] | None
    job_id: str | None

    @classmethod
    def of(cls, batch: BatchRecord, progress: Progress | None) -> Self:
        """`progress`: the job's, of a batch that has one and has not ended."""
        return cls(
            errors=None if batch.errors is None else LineErrors.model_validate({"data": batch.errors}),
            status=batch.state,
            request_counts=_counts(batch, progress),
            usage=_usage(batch, progress),
            expires_at=int(batch.expires_at),
            **{name: getattr(batch, name) for name in _SAME},
            **{name: _seconds(getattr(batch, name)) for name in _TIMES},
        )


_SAME = (
    "id",
    "endpoint",
    "model",
    "input_file_id",
    "completion_window",
    "output_file_id",
    "error_file_id",
    "metadata",
    "job_id",
)
_TIMES = (
    "created_at",
    "in_progress_at",
    "finalizing_at",
    "completed_at",
    "failed_at",
    "expired_at",
    "cancelling_at",
    "cancelled_at",
)


def _seconds(time: float | None) -> Any:
    return None if time is None else int(time)


def _counts(batch: BatchRecord, progress: Progress | None) -> RequestCounts:
    if progress is not None:
        completed = progress.rows_done - progress.rows_failed
        return RequestCounts(total=progress.rows_total, completed=completed, failed=progress.rows_failed)
    return RequestCounts(total=batch.num_total or 0, completed=batch.num_completed or 0, failed=batch.num_failed or 0)


def _usage(batch: BatchRecord, progress: Progress | None) -> BatchUsage | None:
    tokens = batch if progress is None else progress
    if tokens.prompt_tokens is None or tokens.completion_tokens is None:
        return None
    return BatchUsage(
        input_tokens=tokens.prompt_tokens,
        input_tokens_details=InputDetails(cached_tokens=tokens.cached_tokens or 0),
        output_tokens=tokens.completion_tokens,
        output_tokens_details=OutputDetails(reasoning_tokens=batch.reasoning_tokens or 0),
        total_tokens=tokens.prompt_tokens + tokens.completion_tokens,
    )


class BatchList(BaseModel):
    """The newest first."""

    object: Literal["list"] = "list"
    data: list[BatchBody]
    first_id: str | None
    last_id: str | None
    has_more: bool
