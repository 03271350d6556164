"""The bodies of requests and answers."""

import time
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, FailFast, Field, JsonValue

from ...engine.hub import public_name
from ...storage.records import JobRecord, JobState, Progress
from ..schemas import SamplingSpec

_EXAMPLE: dict[str, JsonValue] = {
    "model": "model",
    "rows": [{"custom_id": "ticket-1", "text": "I was charged twice this month."}],
    "prompt": "{text}",
    "choices": ["billing", "shipping"],
}


def _refuse_half_pairs(text: str) -> str:
    """JSON can spell half of a surrogate pair, which is no text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("an escape is half of a surrogate pair") from error
    return text


Text = Annotated[str, AfterValidator(_refuse_half_pairs)]


class JobRequest(BaseModel):
    """A job over rows that come with the request.

    `prompt` is a template over the rows' fields (`{text}`); without one each row brings `messages` or a `prompt`.
    `choices` restricts every answer to one of them. A row's `custom_id` comes back with its answer.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, json_schema_extra={"examples": [_EXAMPLE]}
    )

    model: Text
    # The first bad row is enough: a message for each of a million helps nobody.
    rows: Annotated[list[dict[str, JsonValue]], FailFast(), Field(min_length=1)]
    prompt: Text | None = None
    system: Text | None = None
    choices: tuple[Text, ...] | None = None
    sampling: SamplingSpec = SamplingSpec()
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    quantization: Literal["int8"] | None = None


class RowCounts(BaseModel):
    """`done` includes `failed`."""

    total: int
    done: int
    failed: int


class ShardCounts(BaseModel):
    total: int
    done: int


class TokenCounts(BaseModel):
    """Of the rows that are done. `cached`: prompt tokens that the prefix cache spared."""

    prompt: int
    cached: int
    completion: int


class JobAnswer(BaseModel):
    """A job as it stands. Times are seconds since the epoch; `error` says why it waits, if it does.

    `rows_per_second` is the average since a worker first took the job up.
    """

    id: str
    object: Literal["job"] = "job"
    state: JobState
    model: str
    dtype: str
    quantization: str | None
    created_at: float
    started_at: float | None
    finished_at: float | None
    rows: RowCounts
    shards: ShardCounts
    tokens: TokenCounts
    rows_per_second: float | None
    error: str | None

    @classmethod
    def of(cls, job: JobRecord, progress: Progress) -> Self:
        return cls(
            id=job.id,
            state=progress.state,
            model=public_name(job.model),
            dtype=job.spec["dtype"],
            # Jobs of before there was a choice do not say.
            quantization=job.spec.get("quantization"),
            created_at=job.created_at,
            started_at=job.started_at,
            finished_at=job.finished_at,
            rows=RowCounts(total=progress.rows_total, done=progress.rows_done, failed=progress.rows_failed),
            shards=ShardCounts(total=progress.shards_total, done=progress.shards_done),
            tokens=TokenCounts(
                prompt=progress.prompt_tokens, cached=progress.cached_tokens, completion=progress.completion_tokens
            ),
            rows_per_second=_rows_per_second(job, progress),
            error=progress.error,
        )


class JobList(BaseModel):
    """The newest first."""

    object: Literal["list"] = "list"
    data: list[JobAnswer]


class ResultPage(BaseModel):
    """Finished rows in the order of the input: its fields, and the answer's.

    `last_row` is the `after_row` of the next page. While `state` is `running`, rows before `last_row` may still be
    open: they appear when the page is read again.
    """

    object: Literal["list"] = "list"
    state: JobState
    data: list[dict[str, Any]]
    last_row: int | None
    has_more: bool


class Readiness(BaseModel):
    """`ok`, or what is wrong, for each of what the API needs."""

    ready: bool
    ledger: str
    redis: str


def _rows_per_second(job: JobRecord, progress: Progress) -> float | None:
    if job.started_at is None or not progress.rows_done:
        return None
    # The database's clock may be ahead of ours.
    seconds = (job.finished_at or time.time()) - job.started_at
    return round(progress.rows_done / seconds, 3) if seconds > 0 else None
