"""How one job stands: what is recorded of it, how far it has come, how fast it goes."""

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, ScalarSelect, Select, case, func, select, true

from ..errors import UnknownJob
from .clock import now
from .records import JobRecord, Progress, ShardState
from .tables import attempts, jobs, parts, shards

# Long enough for several parts of slow rows, short enough to show what a second worker does.
_RECENT_SECONDS = 60.0


@dataclass(frozen=True)
class Standing:
    """A job at one moment. `rows_per_second`: those of the last minute; None before it began, and when it has ended."""

    job: JobRecord
    progress: Progress
    rows_per_second: float | None

    @classmethod
    def read(cls, connection: Connection, job_id: str) -> "Standing":
        """In a transaction that sees one moment. Raises UnknownJob."""
        job = read_job(connection, job_id)
        recent = None if job.finished_at is not None else recent_rows_per_second(connection, job_id)
        return cls(job, read_progress(connection, job_id), recent)


def read_job(connection: Connection, job_id: str) -> JobRecord:
    """Raises UnknownJob."""
    row = connection.execute(select(jobs).where(jobs.c.id == job_id)).one_or_none()
    if row is None:
        raise unknown(job_id)
    return JobRecord(**row._mapping)


def read_progress(connection: Connection, job_id: str) -> Progress:
    """Raises UnknownJob."""
    row = connection.execute(_progress_of(job_id)).one_or_none()
    if row is None:
        raise unknown(job_id)
    return Progress(**row._mapping)


def recent_rows_per_second(connection: Connection, job_id: str) -> float | None:
    """Rows committed in the last minute, or since the job began if that is less; None before it began.

    Raises UnknownJob.
    """
    window = func.coalesce(now() - jobs.c.started_at, 0.0)
    seconds = connection.scalar(select(window).where(jobs.c.id == job_id))
    recent = select(func.coalesce(func.sum(parts.c.num_rows), 0)).where(
        parts.c.job_id == job_id, parts.c.committed_at > now() - _RECENT_SECONDS
    )
    rows = connection.scalar(recent)
    if seconds is None:
        raise unknown(job_id)
    return rows / min(seconds, _RECENT_SECONDS) if seconds > 0 and rows is not None else None


def unknown(job_id: str) -> UnknownJob:
    return UnknownJob(f"job {job_id!r} is unknown: `headrace jobs` lists those there are")


def _trouble_of(job_id: str) -> ScalarSelect[str]:
    """What one of the attempts that run waits for, or ended the last one at a shard that nobody has taken since."""
    last = select(attempts.c.error).join(shards, shards.c.attempt_id == attempts.c.id)
    last = last.where(shards.c.job_id == job_id, shards.c.state.in_((ShardState.RUNNING, ShardState.QUEUED)))
    return last.where(attempts.c.error.is_not(None)).limit(1).scalar_subquery()


def _progress_of(job_id: str) -> Select[Any]:
    sums = {
        "rows_done": parts.c.num_rows,
        "rows_failed": parts.c.num_failed,
        "rows_from_cache": parts.c.num_from_cache,
        "rows_truncated": parts.c.num_truncated,
        "prompt_tokens": parts.c.prompt_tokens,
        "cached_tokens": parts.c.cached_tokens,
        "completion_tokens": parts.c.completion_tokens,
    }
    done = select(*(func.coalesce(func.sum(column), 0).label(name) for name, column in sums.items()))
    done_parts = done.where(parts.c.job_id == job_id).subquery()
    counts = select(
        func.count().label("shards_total"),
        func.count().filter(shards.c.state == ShardState.DONE).label("shards_done"),
    )
    job_shards = counts.where(shards.c.job_id == job_id).subquery()
    waiting = select(shards.c.id).where(shards.c.job_id == job_id, shards.c.retry_at.is_not(None))
    error = func.coalesce(case((waiting.exists(), jobs.c.error)), _trouble_of(job_id)).label("error")
    job = (jobs.c.id.label("job_id"), jobs.c.state, jobs.c.num_rows.label("rows_total"), error)
    joined = jobs.join(done_parts, true()).join(job_shards, true())
    return select(*job, done_parts, job_shards).select_from(joined).where(jobs.c.id == job_id)
