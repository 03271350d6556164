"""What goes into the ledger and what comes out of it. Times are seconds since the epoch."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

# Whose everything is as long as nobody names another tenant.
DEFAULT_TENANT = "default"


class JobState(StrEnum):
    """A paused job's shards are neither claimed nor renewed; what an attempt has finished is still committed."""

    RUNNING = "running"
    PAUSED = "paused"
    COMPLETED = "completed"
    CANCELLED = "cancelled"

    @property
    def has_ended(self) -> bool:
        return self in ENDED


# Of a job that has not ended, and of one that has.
OPEN = (JobState.RUNNING, JobState.PAUSED)
ENDED = (JobState.COMPLETED, JobState.CANCELLED)


class ShardState(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"


class AttemptOutcome(StrEnum):
    """`LOST`: its worker was not heard of again, and has died unless it is heard of later."""

    DONE = "done"
    RELEASED = "released"
    FAILED = "failed"
    LOST = "lost"


class WebhookState(StrEnum):
    """`WAITING` for the job to end, then `PENDING` until it is `DELIVERED`, or given up: `FAILED`."""

    WAITING = "waiting"
    PENDING = "pending"
    DELIVERED = "delivered"
    FAILED = "failed"

    @property
    def is_owed(self) -> bool:
        """Whether something is yet to be told."""
        return self in (WebhookState.WAITING, WebhookState.PENDING)


@dataclass(frozen=True)
class NewWebhook:
    """Where the end of a job is to be told. `secret` signs it: after `whsec_` base64, else as it is."""

    url: str
    secret: str | None = field(default=None, repr=False)


@dataclass(frozen=True)
class NewJob:
    """A job to record. `spec` is JSON; `num_planned_errors` counts the rows that the planner refused.

    `answer_tokens`: the most that all answers may have, where each row says it for itself rather than the `spec`.
    `within_seconds` from now on, rows without an answer expire. No two jobs of a tenant have the same
    `idempotency_key`.
    `sink` is a `SinkSpec` as a dictionary.
    Of the `prompt_tokens`, `shareable_tokens` also begin the prompt planned before theirs, `shared_tokens` one in the
    same shard; both in whole KV blocks.
    """

    id: str
    queue: str
    model: str
    output_dir: str
    fingerprint: str
    num_rows: int
    spec: dict[str, Any] = field(default_factory=dict)
    num_planned_errors: int = 0
    prompt_tokens: int = 0
    shareable_tokens: int = 0
    shared_tokens: int = 0
    within_seconds: float | None = None
    idempotency_key: str | None = None
    # With its password.
    sink: dict[str, str] | None = field(default=None, repr=False)
    tenant: str = DEFAULT_TENANT
    priority: int = 0
    webhook: NewWebhook | None = None
    answer_tokens: int | None = None


@dataclass(frozen=True)
class NewShard:
    """A shard to record. With `retry_of` it tries rows of the shard of that number again, from the same spool."""

    number: int
    num_rows: int
    spool_path: str
    retry_of: int | None = None


@dataclass(frozen=True)
class NewPart:
    """A part file that is written and synced under its temporary name; `num_rows` includes `num_failed`.

    `num_from_cache`: the rows whose answers are earlier jobs'. `num_truncated`: those whose answers a limit cut off.
    """

    file_name: str
    num_rows: int
    num_failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    num_from_cache: int = 0
    num_truncated: int = 0


@dataclass(frozen=True)
class JobRecord:
    """`error` says why the job waits: the last reason for which a shard was handed back.

    `weights` tells those it is answered with from others, once a worker has begun; jobs of before that have None.
    `other_weights`: those of later workers that had others under the same name, one a line.
    `tidy_at`: of one that has ended and is not tidy yet, when somebody else may see to it.
    """

    id: str
    state: JobState
    queue: str
    model: str
    output_dir: str
    fingerprint: str
    num_rows: int
    num_planned_errors: int
    prompt_tokens: int | None
    shareable_tokens: int | None
    shared_tokens: int | None
    answer_tokens: int | None
    spec: dict[str, Any]
    created_at: float
    started_at: float | None
    finished_at: float | None
    deadline_at: float | None
    idempotency_key: str | None
    sink: dict[str, str] | None = field(repr=False)
    error: str | None
    tenant: str
    priority: int
    weights: str | None
    other_weights: str | None
    tidy_at: float | None

    @property
    def all_weights(self) -> list[str]:
        """What its workers have had; more than one means that rows may be answered by different models."""
        others = (self.other_weights or "").split("\n")
        return [weights for weights in (self.weights, *others) if weights]


@dataclass(frozen=True)
class ShardRecord:
    """`attempt_id` is the latest attempt's; it owns the shard only while the state is running.

    `retry_at`: when a shard that failed is offered again.
    """

    id: str
    job_id: str
    number: int
    state: ShardState
    num_rows: int
    spool_path: str
    num_attempts: int
    attempt_id: int | None
    lease_owner: str | None
    lease_expires_at: float | None
    enqueued_at: float | None
    retry_at: float | None
    retry_of: int | None


@dataclass(frozen=True)
class AttemptRecord:
    """`trial_rows`: those it last gave to the engine alone, to learn whether they kill the worker."""

    id: int
    shard_id: str
    number: int
    owner: str
    started_at: float
    ended_at: float | None
    outcome: AttemptOutcome | None
    error: str | None
    trial_rows: list[int] | None


@dataclass(frozen=True)
class PartRecord:
    id: int
    job_id: str
    shard_id: str
    attempt_id: int
    file_name: str
    num_rows: int
    num_failed: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    num_from_cache: int
    num_truncated: int
    committed_at: float


@dataclass(frozen=True)
class Replacement:
    """A committed part that goes, and what of its rows stays: None when nothing does."""

    old: PartRecord
    rest: NewPart | None


@dataclass(frozen=True)
class Claim:
    """An attempt's right to a shard, as proof to hand back to the ledger. `attempt_number` counts from 1.

    `seconds_left`: until the job's deadline, if it has one. `retry_of` is the shard's.
    """

    shard_id: str
    job_id: str
    shard_number: int
    attempt_id: int
    attempt_number: int
    owner: str
    num_rows: int
    spool_path: str
    retry_of: int | None
    seconds_left: float | None

    @property
    def name(self) -> str:
        """No other attempt's that a worker is at, without a slash: SQLite gives ids of deleted jobs' attempts again."""
        return f"{self.job_id}:{self.shard_number}:{self.attempt_id}"

    @property
    def is_expired(self) -> bool:
        """Whether the job's deadline had passed."""
        return self.seconds_left is not None and self.seconds_left < 0


@dataclass(frozen=True)
class Progress:
    """Sums over the committed parts of a job; `rows_done` includes the other kinds of rows.

    `rows_truncated`: those whose answers a limit of tokens cut off; parts of before that was counted have none.
    `error`: why shards of it wait, or attempts at them that run, while some do.
    """

    job_id: str
    state: JobState
    rows_total: int
    rows_done: int
    rows_failed: int
    rows_from_cache: int
    rows_truncated: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    shards_total: int
    shards_done: int
    error: str | None


def shard_id_of(job_id: str, shard_number: int) -> str:
    """The id that a Celery message carries."""
    return f"{job_id}/{shard_number:05d}"
