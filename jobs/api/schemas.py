"""The bodies of answers, and what is in them."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, JsonValue

from ...engine.structured.structured_outputs import as_choices
from ...storage.ledger.records import JobRecord, JobState, Progress, WebhookState
from ...storage.ledger.standing import Standing
from ..spec.precision import Precision

_EXAMPLE: dict[str, JsonValue] = {
    "id": "job_9f8b2c6d1e3a4b57",
    "object": "job",
    "state": "running",
    "model": "model",
    "dtype": "auto",
    "quantization": None,
    "kv_cache_dtype": "auto",
    "priority": 0,
    "created_at": 1767225600.0,
    "started_at": 1767225601.5,
    "finished_at": None,
    "deadline_at": None,
    "rows": {"total": 1000, "done": 256, "failed": 1, "from_cache": 0, "truncated": 12},
    "shards": {"total": 4, "done": 1},
    "tokens": {"prompt": 61440, "cached": 46080, "completion": 1280, "cached_share": 0.75},
    "rows_per_second": 64.0,
    "eta_seconds": 11.6,
    "workers": 1,
    "error": None,
}


def _refuse_half_pairs(text: str) -> str:
    """JSON can spell half of a surrogate pair, which is no text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("an escape is half of a surrogate pair") from error
    return text


def _refuse_nul(text: str) -> str:
    """No database's text, path or header can have one."""
    if "\0" in text:
        raise ValueError("must be a text without NUL")
    return text


Text = Annotated[str, AfterValidator(_refuse_half_pairs)]
# What is looked for, or written into the ledger, rather than being read by a model.
Name = Annotated[Text, AfterValidator(_refuse_nul)]
# What an answer may be; whole numbers, such as ratings, are taken as they are written.
Choices = Annotated[tuple[Text, ...], BeforeValidator(as_choices, json_schema_input_type=list[str | int])]


class RowCounts(BaseModel):
    """`done` includes the others. `from_cache`: rows with the answers of earlier jobs; `truncated`: with answers that a
    limit of tokens cut off.
    """

    total: int
    done: int
    failed: int
    from_cache: int
    truncated: int

    @classmethod
    def of(cls, progress: Progress) -> Self:
        return cls(
            total=progress.rows_total,
            done=progress.rows_done,
            failed=progress.rows_failed,
            from_cache=progress.rows_from_cache,
            truncated=progress.rows_truncated,
        )


class ShardCounts(BaseModel):
    total: int
    done: int


class TokenCounts(BaseModel):
    """Of the rows that are done. `cached`: prompt tokens that the prefix cache spared, and their share of all."""

    prompt: int
    cached: int
    completion: int
    cached_share: float | None

    @classmethod
    def of(cls, progress: Progress) -> Self:
        prompt, cached = progress.prompt_tokens, progress.cached_tokens
        share = round(cached / prompt, 4) if prompt else None
        return cls(prompt=prompt, cached=cached, completion=progress.completion_tokens, cached_share=share)


class JobAnswer(BaseModel):
    """A job as it stands. Times are seconds since the epoch; `error` says why it waits, if it does.

    `rows_per_second` is that of the last minute while the job runs, and of the whole job once it has ended.
    `eta_seconds`: how long the rest takes at this rate. `workers`: how many serve its model at its precision now, so
    that with 0 it waits for one; null once it has ended, and while Redis does not tell.
    """

    model_config = ConfigDict(json_schema_extra={"examples": [_EXAMPLE]})

    id: str
    object: Literal["job"] = "job"
    state: JobState
    model: str
    dtype: str
    quantization: str | None
    kv_cache_dtype: str
    priority: int
    created_at: float
    started_at: float | None
    finished_at: float | None
    deadline_at: float | None
    rows: RowCounts
    shards: ShardCounts
    tokens: TokenCounts
    rows_per_second: float | None
    eta_seconds: float | None
    workers: int | None
    error: str | None

    @classmethod
    def of(cls, standing: Standing, model: str, num_workers: int | None) -> Self:
        """`model`: what clients call it."""
        job, progress = standing.job, standing.progress
        rate = _rows_per_second(job, progress, standing.rows_per_second)
        return cls(
            id=job.id,
            state=progress.state,
            model=model,
            **Precision.of_spec(job.spec)._asdict(),
            priority=job.priority,
            created_at=job.created_at,
            started_at=job.started_at,
            finished_at=job.finished_at,
            deadline_at=job.deadline_at,
            rows=RowCounts.of(progress),
            shards=ShardCounts(total=progress.shards_total, done=progress.shards_done),
            tokens=TokenCounts.of(progress),
            rows_per_second=rate,
            eta_seconds=_eta_seconds(progress, rate),
            workers=num_workers,
            error=progress.error,
        )


class JobList(BaseModel):
    """The newest first. `last_id` is the `after` of the next page."""

    object: Literal["list"] = "list"
    data: list[JobAnswer]
    last_id: str | None
    has_more: bool


class DeletedJob(BaseModel):
    id: str
    object: Literal["job"] = "job"
    deleted: Literal[True] = True


class WebhookAnswer(BaseModel):
    """How far the telling of an end is. `waiting`: for that end; `pending`: it is sent until it is `delivered`.

    `error` is what went wrong last; `failed`: it was not taken for a day, or will never be.
    """

    state: WebhookState
    error: str | None


class WebhookList(BaseModel):
    object: Literal["list"] = "list"
    data: list[WebhookAnswer]

    @classmethod
    def of(cls, found: Sequence[tuple[WebhookState, str | None]]) -> Self:
        return cls(data=[WebhookAnswer(state=state, error=error) for state, error in found])


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


def _rows_per_second(job: JobRecord, progress: Progress, recent: float | None) -> float | None:
    if job.finished_at is None:
        return None if recent is None else round(recent, 3)
    if job.started_at is None or not progress.rows_done:
        return None
    seconds = job.finished_at - job.started_at
    return round(progress.rows_done / seconds, 3) if seconds > 0 else None


def _eta_seconds(progress: Progress, rate: float | None) -> float | None:
    if progress.state is not JobState.RUNNING or not rate:
        return None
    return round((progress.rows_total - progress.rows_done) / rate, 1)
