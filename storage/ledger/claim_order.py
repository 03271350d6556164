"""Which shard a worker is given next: of the job whose turn it is, the one that follows what the worker did last.

The statements are made once, as that takes longer than to run them.
"""

from collections.abc import Collection, Mapping, Sequence
from functools import cache
from itertools import pairwise

from sqlalchemy import (
    CTE,
    ColumnElement,
    Connection,
    Double,
    ScalarSelect,
    Select,
    Subquery,
    bindparam,
    cast,
    func,
    or_,
    select,
)

from .clock import now
from .records import JobState, ShardState
from .tables import jobs, shards, tenants


def lock_next_shard(
    connection: Connection, queue: str, after: Mapping[str, int], unwanted: Collection[str] = ()
) -> str | None:
    """The id of the queued shard to take, locked against other claims; None when nothing is to be had.

    `after`: the number of the shard that the worker had last, by job. Shards with one prefix have neighbouring
    numbers: a worker that goes on where it was finds the prefix in its cache. `unwanted`: jobs that it cannot do.
    """
    tried = list(unwanted)
    while (job_id := next_job(connection, queue, tried)) is not None:
        if (shard_id := _lock_shard(connection, job_id, after.get(job_id))) is not None:
            return shard_id
        # Others are just taking the last of it.
        tried.append(job_id)
    return None


def next_job(connection: Connection, queue: str, tried: Sequence[str] = ()) -> str | None:
    """The job with a shard to take whose turn it is; not one that was tried."""
    first = connection.scalars(_first_jobs(), {"queue": queue, "tried": tried})
    candidates = [job_id for job_id in first if job_id is not None]
    if len(candidates) > 1:
        return connection.scalar(_in_turn(), {"queue": queue, "candidates": candidates})
    return candidates[0] if candidates else None


@cache
def _first_jobs() -> Select[str | None]:
    """Of each tenant with a running job on the queue the one that comes before its others, if it has one to take."""
    names = _tenants()
    return select(_first_job(names.c.name)).where(names.c.name.is_not(None))


def _tenants() -> CTE:
    """The tenants with a running job on the queue, found one after the other in an index; the last one is null."""
    tenant = select(jobs.c.tenant).where(jobs.c.state == JobState.RUNNING, jobs.c.queue == bindparam("queue"))
    first = tenant.order_by(jobs.c.tenant).limit(1)
    names = select(first.scalar_subquery().label("name")).cte("names", recursive=True)
    following = first.where(jobs.c.tenant > names.c.name).correlate(names).scalar_subquery()
    return names.union_all(select(following).where(names.c.name.is_not(None)))


def _first_job(tenant: ColumnElement[str]) -> ScalarSelect[str]:
    """A tenant's job with a shard to take that comes before its others; both steps follow an index."""
    of_tenant = select(jobs.c.id).where(jobs.c.state == JobState.RUNNING, jobs.c.queue == bindparam("queue"))
    untried = jobs.c.id.not_in(bindparam("tried", expanding=True))
    free = of_tenant.where(jobs.c.tenant == tenant, untried, _has_free_shard())
    highest = free.with_only_columns(jobs.c.priority).order_by(jobs.c.priority.desc()).limit(1).correlate(tenant.table)
    oldest = free.where(jobs.c.priority == highest.scalar_subquery()).order_by(jobs.c.created_at, jobs.c.id)
    return oldest.limit(1).scalar_subquery()


@cache
def _in_turn() -> Select[str]:
    """The candidates' first: by priority, then by its tenant's leases for its weight, then by age."""
    held = _leases_held()
    load = cast(func.coalesce(held.c.num_leases, 0), Double) / func.coalesce(tenants.c.weight, 1)
    return (
        select(jobs.c.id)
        .outerjoin(held, held.c.tenant == jobs.c.tenant)
        .outerjoin(tenants, tenants.c.name == jobs.c.tenant)
        .where(jobs.c.id.in_(bindparam("candidates", expanding=True)))
        .order_by(jobs.c.priority.desc(), load, jobs.c.created_at, jobs.c.id)
        .limit(1)
    )


def _leases_held() -> Subquery:
    """How many shards of each tenant the queue's workers have at the moment."""
    running = select(jobs.c.tenant, func.count().label("num_leases")).join(shards, shards.c.job_id == jobs.c.id)
    running = running.where(shards.c.state == ShardState.RUNNING, jobs.c.queue == bindparam("queue"))
    return running.group_by(jobs.c.tenant).subquery()


def _free(job_id: ColumnElement[str]) -> Select[str]:
    """A job's shards that can be taken now."""
    is_due = or_(shards.c.retry_at.is_(None), shards.c.retry_at <= now())
    return select(shards.c.id).where(shards.c.job_id == job_id, shards.c.state == ShardState.QUEUED, is_due)


def _has_free_shard() -> ColumnElement[bool]:
    # Not `EXISTS`, which PostgreSQL may turn into a join that reads the shards of all jobs first.
    return _free(jobs.c.id).limit(1).correlate(jobs).scalar_subquery().is_not(None)


def _lock_shard(connection: Connection, job_id: str, last: int | None) -> str | None:
    if last is not None:
        shard_id = connection.scalar(_successor(), {"job_id": job_id, "number": last + 1})
        if shard_id is not None:
            return shard_id
    return _lock_from(connection, job_id, _start(connection, job_id)) or _lock_from(connection, job_id, 0)


def _lock_from(connection: Connection, job_id: str, number: int) -> str | None:
    return connection.scalar(_first_from(), {"job_id": job_id, "number": number})


@cache
def _successor() -> Select[str]:
    return _locked(_free(bindparam("job_id")).where(shards.c.number == bindparam("number")))


@cache
def _first_from() -> Select[str]:
    return _locked(_free(bindparam("job_id")).where(shards.c.number >= bindparam("number")))


def _locked(free: Select[str]) -> Select[str]:
    return free.order_by(shards.c.number).limit(1).with_for_update(skip_locked=True, key_share=True)


def _start(connection: Connection, job_id: str) -> int:
    """Where a worker starts that does not go on: where no other will come by, else halfway between two others."""
    of_job = {"job_id": job_id}
    lowest = connection.scalar(_lowest(), of_job)
    running = connection.execute(_running_with_next_done(), of_job).all()
    if lowest is None or not any(number == lowest - 1 for number, _ in running):
        return lowest or 0
    end: int = connection.scalars(select(func.max(shards.c.number) + 1).where(shards.c.job_id == job_id)).one()
    runs = [
        (number + 1, min(following, end if done is None else done))
        for (number, done), (following, _) in pairwise([*running, (end, None)])
    ]
    start, stop = max(runs, key=lambda run: run[1] - run[0])
    return start + (stop - start) // 2


@cache
def _lowest() -> Select[int]:
    return _free(bindparam("job_id")).order_by(shards.c.number).with_only_columns(shards.c.number).limit(1)


@cache
def _running_with_next_done() -> Select[int, int | None]:
    """The numbers of a job's running shards in order, each with that of the first done shard after it."""
    later = shards.alias()
    next_done = select(func.min(later.c.number)).where(
        later.c.job_id == bindparam("job_id"), later.c.state == ShardState.DONE, later.c.number > shards.c.number
    )
    running = select(shards.c.number, next_done.scalar_subquery())
    return running.where(shards.c.job_id == bindparam("job_id"), shards.c.state == ShardState.RUNNING).order_by(
        shards.c.number
    )
