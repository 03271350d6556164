"""What keeps one tenant, or all together, from queuing more jobs than they may."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, func, select

from ..errors import LedgerError
from .records import OPEN, NewJob, ShardState
from .tables import jobs, shards, tenants


@dataclass(frozen=True)
class Quota:
    """What a new job may not go beyond; None is no limit.

    `concurrent_jobs` and `queued_tokens` are its tenant's, `max_queued_jobs` counts the open jobs of all.
    `held_tokens`: those of `queued_tokens` that something else than jobs has.
    """

    concurrent_jobs: int | None = None
    queued_tokens: int | None = None
    max_queued_jobs: int | None = None
    held_tokens: int = 0


NO_QUOTA = Quota()


class QuotaExceeded(LedgerError):
    """A job was not recorded because of a limit; `limit` names it. If it `fits` it may be once others have ended.

    `num_tokens`: as many as it would have taken.
    """

    def __init__(self, limit: str, message: str, num_tokens: int = 0, fits: bool = True) -> None:
        super().__init__(message)
        self.limit = limit
        self.num_tokens = num_tokens
        self.fits = fits


def check_quota(connection: Connection, tenant: str, quota: Quota, num_tokens: int) -> None:
    """Raises QuotaExceeded when a job of so many tokens would be too much now. Changes nothing.

    In a writing transaction the tenant's other jobs wait for its end, so that two can not take one place. The jobs
    of all tenants together may be a few too many when several come at the same time.
    """
    if quota == NO_QUOTA:
        return
    # Holds on PostgreSQL; on SQLite there is only one writer anyway. A tenant with limits has a row.
    connection.execute(select(tenants.c.name).where(tenants.c.name == tenant).with_for_update())
    if (most := quota.max_queued_jobs) is not None and _num_open(connection, None) >= most:
        raise QuotaExceeded("max_queued_jobs", f"there are {most} jobs that have not ended, as many as may wait here")
    if (most := quota.concurrent_jobs) is not None and _num_open(connection, tenant) >= most:
        raise QuotaExceeded("concurrent_jobs", f"you have {most} jobs that have not ended, as many as you may")
    if (most := quota.queued_tokens) is not None:
        if num_tokens > most:
            message = f"{num_tokens} tokens are more than your {most} in all"
            raise QuotaExceeded("queued_tokens", message, num_tokens, fits=False)
        queued = quota.held_tokens + queued_tokens(connection, tenant)
        if queued + num_tokens > most:
            message = f"{num_tokens} tokens beside the {queued} you have queued are more than your {most}"
            raise QuotaExceeded("queued_tokens", message, num_tokens)


def tokens_of(job: NewJob) -> int:
    """Prompt tokens and the most that the answers may have."""
    if job.answer_tokens is not None:
        return job.prompt_tokens + job.answer_tokens
    return job.prompt_tokens + job.num_rows * _row_answer_tokens(job.spec)


def queued_tokens(connection: Connection, tenant: str) -> int:
    """What the rows of a tenant's open shards may take: their prompts, at the job's average, and their answers."""
    columns = (jobs.c.prompt_tokens, jobs.c.answer_tokens, jobs.c.num_rows, jobs.c.spec)
    open_rows = (
        select(*columns, func.sum(shards.c.num_rows).label("open_rows"))
        .join(shards, shards.c.job_id == jobs.c.id)
        .where(jobs.c.tenant == tenant, jobs.c.state.in_(OPEN), shards.c.state != ShardState.DONE)
        .group_by(jobs.c.id)
    )
    return sum(_open_tokens(*job) for job in connection.execute(open_rows))


def _open_tokens(
    prompt_tokens: int | None, answer_tokens: int | None, num_rows: int, spec: Mapping[str, Any], open_rows: int
) -> int:
    if answer_tokens is None:
        answer_tokens = num_rows * _row_answer_tokens(spec)
    # Of jobs recorded before their tokens were counted only the answers are known.
    return ((prompt_tokens or 0) + answer_tokens) * int(open_rows) // num_rows


def _row_answer_tokens(spec: Mapping[str, Any]) -> int:
    """The most tokens that a row's answers may have."""
    sampling = spec.get("sampling", {})
    return int(sampling.get("max_tokens", 0)) * int(sampling.get("n", 1))


def _num_open(connection: Connection, tenant: str | None) -> int:
    counted = select(func.count()).select_from(jobs).where(jobs.c.state.in_(OPEN))
    if tenant is not None:
        counted = counted.where(jobs.c.tenant == tenant)
    return connection.scalar(counted) or 0
