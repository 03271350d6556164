"""What is to be seen of all jobs together: pages of them, how fast they go, what waits. Reads only."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, and_, func, select

from ..database import Database
from .claim_order import next_job
from .clock import now
from .pages import by_age, follows
from .records import OPEN, JobRecord, JobState, ShardState
from .standing import Standing, recent_rows_per_second
from .tables import attempts, jobs, parts, shards

# Of how many jobs the largest tells most about the next.
_LAST_JOBS = 20


@dataclass(frozen=True)
class Totals:
    """Sums over the committed parts of all jobs there are. A job that is deleted takes its share with it."""

    rows: int
    failed_rows: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class Waiting:
    """A queue's shards by their states, and for how long the first of those that wait has been there.

    `model`: that of its jobs, which all have the same; None where there is no job.
    """

    queue: str
    model: str | None
    num_queued: int
    num_running: int
    queued_rows: int
    oldest_seconds: float


@dataclass(frozen=True)
class Pace:
    """How a job has gone: tokens computed a second, those that the prefix cache had left out; tokens a row generated.

    `spec`: the job's, by which a row may have had several answers.
    """

    job_id: str
    tokens_per_second: float
    tokens_per_row: float
    spec: Mapping[str, Any]


@dataclass(frozen=True)
class Ahead:
    """A job that another of its queue waits for; `rows_left`: those that are not done."""

    job_id: str
    rows_left: int


@dataclass(frozen=True)
class Overview:
    """Every method is one transaction and raises what `Ledger`'s methods raise."""

    database: Database

    def page(
        self, tenant: str, limit: int, after: JobRecord | None = None, state: JobState | None = None
    ) -> list[JobRecord]:
        """The first `limit` of a tenant's jobs after the job `after`, the newest first."""
        wanted = select(jobs).where(jobs.c.tenant == tenant)
        if state is not None:
            wanted = wanted.where(jobs.c.state == state)
        if after is not None:
            wanted = wanted.where(follows(jobs, after, newest_first=True))
        newest = wanted.order_by(*by_age(jobs, newest_first=True)).limit(limit)
        with self.database.read() as connection:
            return [JobRecord(**row._mapping) for row in connection.execute(newest)]

    def open_jobs(self, limit: int = 100) -> list[JobRecord]:
        """Jobs of all tenants that have not ended, the newest first."""
        newest = select(jobs).where(jobs.c.state.in_(OPEN)).order_by(*by_age(jobs, newest_first=True))
        with self.database.read() as connection:
            return [JobRecord(**row._mapping) for row in connection.execute(newest.limit(limit))]

    def recent_rows_per_second(self, job_id: str) -> float | None:
        """As `standing.recent_rows_per_second` has it. Raises UnknownJob."""
        with self.database.read() as connection:
            return recent_rows_per_second(connection, job_id)

    def standing(self, job_id: str) -> Standing:
        """Raises UnknownJob."""
        with self.database.snapshot() as connection:
            return Standing.read(connection, job_id)

    def ahead_of(self, job_id: str) -> Ahead | None:
        """Whose rows the workers do, or do next, while a running job has some to be taken and none under way."""
        is_running, is_queued = (
            select(shards.c.id).where(shards.c.job_id == jobs.c.id, shards.c.state == state).exists()
            for state in (ShardState.RUNNING, ShardState.QUEUED)
        )
        waiting = select(jobs.c.queue).where(jobs.c.id == job_id, jobs.c.state == JobState.RUNNING)
        with self.database.read() as connection:
            queue = connection.scalar(waiting.where(is_queued, ~is_running))
            if queue is None:
                return None
            others = select(jobs.c.id).where(jobs.c.queue == queue, jobs.c.state == JobState.RUNNING, is_running)
            in_order = others.order_by(jobs.c.priority.desc(), jobs.c.created_at, jobs.c.id)
            first = connection.scalar(in_order.limit(1)) or next_job(connection, queue)
            if first is None or first == job_id:
                return None
            done = select(func.coalesce(func.sum(parts.c.num_rows), 0)).where(parts.c.job_id == first)
            left = select(jobs.c.num_rows - done.scalar_subquery()).where(jobs.c.id == first)
            return Ahead(first, int(connection.scalars(left).one()))

    def pace(self, queue: str) -> Pace | None:
        """That of the largest of the last jobs of a queue which have completed; None where there is none."""
        ended = and_(jobs.c.queue == queue, jobs.c.state == JobState.COMPLETED, jobs.c.finished_at > jobs.c.started_at)
        last = select(jobs).where(ended).order_by(jobs.c.finished_at.desc()).limit(_LAST_JOBS).subquery()
        answers = func.sum(parts.c.completion_tokens)
        computed = func.sum(parts.c.prompt_tokens - parts.c.cached_tokens) + answers
        largest = (
            select(last.c.id, computed, answers, func.sum(parts.c.num_rows))
            .join(parts, parts.c.job_id == last.c.id)
            .group_by(last.c.id)
            .order_by(computed.desc())
            .limit(1)
        )
        with self.database.read() as connection:
            row = connection.execute(largest).one_or_none()
            if row is None or not row[1]:
                return None
            job_id, tokens, answer_tokens, num_rows = row
            if not (seconds := _seconds_at_work(connection, job_id)):
                return None
            spec = connection.scalars(select(jobs.c.spec).where(jobs.c.id == job_id)).one()
        return Pace(job_id, float(tokens) / seconds, float(answer_tokens) / num_rows, spec)

    def jobs_by_state(self) -> Mapping[JobState, int]:
        counted = select(jobs.c.state, func.count()).group_by(jobs.c.state)
        with self.database.read() as connection:
            found: dict[JobState, int] = {row[0]: row[1] for row in connection.execute(counted)}
        return {state: found.get(state, 0) for state in JobState}

    def waiting(self) -> list[Waiting]:
        """For each queue that an open job is on. What a paused job has does not wait."""
        queued, running = shards.c.state == ShardState.QUEUED, shards.c.state == ShardState.RUNNING
        is_running = jobs.c.state == JobState.RUNNING
        counts = (
            select(
                jobs.c.queue,
                func.min(jobs.c.model),
                func.count().filter(and_(queued, is_running)),
                func.count().filter(and_(running, is_running)),
                func.coalesce(func.sum(shards.c.num_rows).filter(and_(queued, is_running)), 0),
                func.coalesce(now() - func.min(jobs.c.created_at).filter(and_(queued, is_running)), 0.0),
            )
            .select_from(jobs.join(shards, shards.c.job_id == jobs.c.id))
            .where(jobs.c.state.in_(OPEN))
            .group_by(jobs.c.queue)
            .order_by(jobs.c.queue)
        )
        with self.database.read() as connection:
            return [
                Waiting(queue, model, num_queued, num_running, int(rows), float(age))
                for queue, model, num_queued, num_running, rows, age in connection.execute(counts)
            ]

    def totals(self) -> Totals:
        columns = (
            parts.c.num_rows,
            parts.c.num_failed,
            parts.c.prompt_tokens,
            parts.c.cached_tokens,
            parts.c.completion_tokens,
        )
        with self.database.read() as connection:
            sums = connection.execute(select(*(func.coalesce(func.sum(column), 0) for column in columns))).one()
        return Totals(*map(int, sums))


def _seconds_at_work(connection: Connection, job_id: str) -> float:
    """While somebody was at one of the job's shards: it may have been paused, or been retried a day later."""
    spans = select(attempts.c.started_at, attempts.c.ended_at).join(shards, shards.c.id == attempts.c.shard_id)
    ended = spans.where(shards.c.job_id == job_id, attempts.c.ended_at.is_not(None)).order_by(attempts.c.started_at)
    seconds = until = 0.0
    for started_at, ended_at in connection.execute(ended):
        seconds += max(0.0, ended_at - max(started_at, until))
        until = max(until, ended_at)
    return seconds
