"""The ledger: which jobs there are, who may work on which shard, and which rows are done. The only truth."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Select, Update, bindparam, delete, func, insert, or_, select, update

from ..database import Database
from ..errors import JobEnded
from .api_keys import ApiKeys
from .batch_records import BatchRecords
from .clock import now
from .file_records import FileRecords
from .leases import Leases
from .messages import Messages
from .migrate import migrate
from .overview import Overview
from .pages import by_age
from .quotas import NO_QUOTA, Quota, check_quota, queued_tokens, tokens_of
from .records import (
    DEFAULT_TENANT,
    ENDED,
    OPEN,
    AttemptRecord,
    JobRecord,
    JobState,
    NewJob,
    NewShard,
    PartRecord,
    Progress,
    ShardRecord,
    ShardState,
    shard_id_of,
)
from .standing import read_job, read_progress, unknown
from .tables import attempts, identity, jobs, parts, shards
from .tenants import Tenants
from .tidying import TIDY_SECONDS, Tidying
from .webhooks import Webhooks, delete_webhooks, insert_webhook, reopen_webhooks


class Ledger:
    """All SQL of headrace. One object serves all threads of a process; every method is one transaction.

    Jobs are created, watched and ended here; a worker's part of it is `leases`, the sweeper's `messages` and `tidying`.
    Every method raises LedgerUnavailable when the database does not answer and LedgerError when it refuses.
    """

    def __init__(self, database_url: str) -> None:
        self.database = Database(database_url)
        self.leases = Leases(self.database)
        self.messages = Messages(self.database)
        self.tidying = Tidying(self.database)
        self.overview = Overview(self.database)
        self.tenants = Tenants(self.database)
        self.api_keys = ApiKeys(self.database)
        self.files = FileRecords(self.database)
        self.batches = BatchRecords(self.database)
        self.webhooks = Webhooks(self.database)

    def migrate(self) -> None:
        """Create or upgrade the schema. Safe when several processes call it; quick when up to date."""
        migrate(self.database)

    def close(self) -> None:
        self.database.close()

    @cached_property
    def identity(self) -> str:
        """What tells this ledger from others, wherever it is moved."""
        with self.database.read() as connection:
            ledger_id: str = connection.scalars(select(identity.c.ledger_id)).one()
        return ledger_id

    def create_job(self, job: NewJob, new_shards: Sequence[NewShard], quota: Quota = NO_QUOTA) -> None:
        """Record a job as running, or as completed when it has no shards. Raises QuotaExceeded."""
        state = JobState.RUNNING if new_shards else JobState.COMPLETED
        finished_at = None if new_shards else now()
        values = asdict(job)
        within_seconds = values.pop("within_seconds")
        del values["webhook"]
        deadline_at = None if within_seconds is None else now() + within_seconds
        with self.database.write() as connection:
            check_quota(connection, job.tenant, quota, tokens_of(job))
            recorded = insert(jobs).values(**values, state=state, created_at=now(), finished_at=finished_at)
            connection.execute(recorded.values(deadline_at=deadline_at))
            _insert_shards(connection, job.id, new_shards)
            if job.webhook is not None:
                insert_webhook(connection, job.webhook, job_id=job.id)

    def job(self, job_id: str) -> JobRecord:
        """Raises UnknownJob."""
        with self.database.read() as connection:
            return read_job(connection, job_id)

    def note_weights(self, job_id: str, weights: str) -> None:
        """Record what a job is answered with, beside what is recorded already."""
        others = func.coalesce(jobs.c.other_weights, "")
        first = update(jobs).where(jobs.c.id == job_id, jobs.c.weights.is_(None))
        another = update(jobs).where(
            jobs.c.id == job_id, jobs.c.weights != weights, ~others.contains(weights, autoescape=True)
        )
        with self.database.write() as connection:
            connection.execute(first.values(weights=weights))
            connection.execute(another.values(other_weights=others + weights + "\n"))

    def check_quota(self, tenant: str, quota: Quota, num_tokens: int = 0) -> None:
        """Raises QuotaExceeded when not even a job of so many tokens could be recorded now."""
        if quota != NO_QUOTA:
            with self.database.read() as connection:
                check_quota(connection, tenant, quota, num_tokens)

    def queued_tokens(self, tenant: str) -> int:
        """Prompt and answer tokens of the rows of a tenant's jobs that are not done."""
        with self.database.read() as connection:
            return queued_tokens(connection, tenant)

    def jobs(self, limit: int = 20, tenant: str | None = None) -> list[JobRecord]:
        """The newest first, of one tenant or of all."""
        newest = select(jobs).order_by(*by_age(jobs, newest_first=True)).limit(limit)
        if tenant is not None:
            newest = newest.where(jobs.c.tenant == tenant)
        with self.database.read() as connection:
            return [JobRecord(**row._mapping) for row in connection.execute(newest)]

    def ended_jobs(self, output_dir: str) -> list[str]:
        """The ids of the jobs that wrote into a folder and write no more. Looks at all jobs."""
        return self._jobs_of_folder(output_dir, ENDED)

    def open_jobs(self, output_dir: str) -> list[str]:
        """The ids of the jobs that have not ended and write into a folder. Looks at all jobs."""
        return self._jobs_of_folder(output_dir, OPEN)

    def _jobs_of_folder(self, output_dir: str, states: Collection[JobState]) -> list[str]:
        of_folder = select(jobs.c.id).where(jobs.c.output_dir == output_dir, jobs.c.state.in_(states))
        with self.database.read() as connection:
            return list(connection.scalars(of_folder))

    def job_of_key(self, idempotency_key: str, tenant: str = DEFAULT_TENANT) -> JobRecord | None:
        """The tenant's job that was recorded with this key."""
        of_key = select(jobs).where(jobs.c.tenant == tenant, jobs.c.idempotency_key == idempotency_key)
        with self.database.read() as connection:
            row = connection.execute(of_key).one_or_none()
        return None if row is None else JobRecord(**row._mapping)

    def cancel_job(self, job_id: str) -> JobState:
        """Stop a running or paused job: no claim, renewal or commit of it succeeds after this. Returns its state.

        A job that has ended stays as it is. Raises UnknownJob.
        """
        running = select(shards.c.id).where(shards.c.job_id == job_id, shards.c.state == ShardState.RUNNING)
        cancelled = {"state": JobState.CANCELLED, "finished_at": now(), "tidy_at": now() + TIDY_SECONDS}
        with self.database.write() as connection:
            # Commits that are under way hold their shards: they are waited for. A job is locked after its shards.
            connection.execute(running.order_by(shards.c.id).with_for_update(key_share=True))
            connection.execute(_changed(job_id, OPEN, cancelled))
        return self.job(job_id).state

    def pause_job(self, job_id: str) -> None:
        """Stop the claims and renewals of a running job; what its attempts have finished may still be committed.

        A paused job stays as it is. Raises UnknownJob, JobEnded.
        """
        _refuse_ended(job_id, self._change_state(job_id, [JobState.RUNNING], state=JobState.PAUSED))

    def resume_job(self, job_id: str) -> list[str]:
        """Let a paused job run; returns the ids of its queued shards, to be sent again.

        A running job stays as it is. Raises UnknownJob, JobEnded.
        """
        _refuse_ended(job_id, self._change_state(job_id, [JobState.PAUSED], state=JobState.RUNNING))
        queued = [shard.id for shard in self.shards(job_id) if shard.state is ShardState.QUEUED]
        self.messages.mark_enqueued(queued)
        return queued

    def set_priority(self, job_id: str, priority: int) -> None:
        """Have a job's shards taken before those of jobs with a lower priority. Raises UnknownJob, JobEnded."""
        _refuse_ended(job_id, self._change_state(job_id, OPEN, priority=priority))

    def retry_job(self, job_id: str, new_shards: Sequence[NewShard], lost: Sequence[PartRecord] = ()) -> bool:
        """Make a completed job run again with these shards added, without its deadline; returns whether it was one.

        `lost`: parts of it whose files are gone, which are forgotten: the shards have their rows.
        """
        again = update(jobs).where(jobs.c.id == job_id, jobs.c.state == JobState.COMPLETED)
        with self.database.write() as connection:
            running = again.values(state=JobState.RUNNING, finished_at=None, deadline_at=None, tidy_at=None)
            if connection.scalar(running.returning(jobs.c.id)) is None:
                return False
            _insert_shards(connection, job_id, new_shards)
            reopen_webhooks(connection, job_id)
            if lost:
                of_job = delete(parts).where(parts.c.job_id == job_id, parts.c.id == bindparam("lost"))
                connection.execute(of_job, [{"lost": part.id} for part in lost])
        return True

    def delete_job(self, job_id: str) -> None:
        """Forget a job with all that belongs to it. Raises UnknownJob."""
        of_job = select(shards.c.id).where(shards.c.job_id == job_id)
        with self.database.write() as connection:
            connection.execute(delete(parts).where(parts.c.job_id == job_id))
            connection.execute(delete(attempts).where(attempts.c.shard_id.in_(of_job)))
            connection.execute(delete(shards).where(shards.c.job_id == job_id))
            delete_webhooks(connection, [job_id])
            if connection.execute(delete(jobs).where(jobs.c.id == job_id)).rowcount == 0:
                raise unknown(job_id)

    def _change_state(self, job_id: str, before: Collection[JobState], **values: Any) -> JobState:
        """Change a job that is in one of the states `before`; returns the state it then has. Raises UnknownJob."""
        with self.database.write() as connection:
            connection.execute(_changed(job_id, before, values))
        return self.job(job_id).state

    def progress(self, job_id: str) -> Progress:
        """Raises UnknownJob."""
        with self.database.read() as connection:
            return read_progress(connection, job_id)

    def shards(self, job_id: str) -> list[ShardRecord]:
        """All shards of a job, by number."""
        of_job = select(shards).where(shards.c.job_id == job_id).order_by(shards.c.number)
        with self.database.read() as connection:
            return [ShardRecord(**row._mapping) for row in connection.execute(of_job)]

    def spool_folder(self, job_id: str) -> Path | None:
        """Where a job's shards are spooled; None of a job without any."""
        with self.database.read() as connection:
            spooled = connection.scalar(select(shards.c.spool_path).where(shards.c.job_id == job_id).limit(1))
        return None if spooled is None else Path(spooled).parent

    def retries(self, job_id: str) -> dict[int, int]:
        """The numbers of the shards that try others' rows again, and of those others."""
        of_job = select(shards.c.number, shards.c.retry_of).where(shards.c.job_id == job_id)
        with self.database.read() as connection:
            found = connection.execute(of_job.where(shards.c.retry_of.is_not(None)))
            return {shard.number: shard.retry_of for shard in found}

    def attempts(self, shard_id: str) -> list[AttemptRecord]:
        """All attempts at a shard, oldest first."""
        of_shard = select(attempts).where(attempts.c.shard_id == shard_id).order_by(attempts.c.number)
        with self.database.read() as connection:
            return [AttemptRecord(**row._mapping) for row in connection.execute(of_shard)]

    def parts(self, job_id: str, shard_number: int | None = None) -> list[PartRecord]:
        """The committed parts of a job or of one of its shards, in the order of their commits."""
        of_job = select(parts).where(parts.c.job_id == job_id).order_by(parts.c.id)
        if shard_number is not None:
            of_job = of_job.where(parts.c.shard_id == shard_id_of(job_id, shard_number))
        with self.database.read() as connection:
            return [PartRecord(**row._mapping) for row in connection.execute(of_job)]

    def part_names(self, job_id: str) -> list[str]:
        """The names of a job's committed parts, in no order: of thousands of parts much sooner there than `parts`."""
        of_job = select(parts.c.file_name).where(parts.c.job_id == job_id)
        with self.database.read() as connection:
            return list(connection.scalars(of_job))

    def retried_parts(self, job_id: str, retry_of: int) -> list[PartRecord]:
        """The committed parts of a shard and of all that try its rows again, in the order of their commits."""
        of_family = select(parts).where(parts.c.shard_id.in_(_family(job_id, retry_of))).order_by(parts.c.id)
        with self.database.read() as connection:
            return [PartRecord(**row._mapping) for row in connection.execute(of_family)]

    def retrying_attempts(self, job_id: str, retry_of: int) -> set[int]:
        """The ids of all attempts at a shard and at those that try its rows again."""
        of_family = select(attempts.c.id).where(attempts.c.shard_id.in_(_family(job_id, retry_of)))
        with self.database.read() as connection:
            return set(connection.scalars(of_family))


def _changed(job_id: str, before: Collection[JobState], values: Mapping[str, Any]) -> Update:
    return update(jobs).where(jobs.c.id == job_id, jobs.c.state.in_(before)).values(**values)


def _refuse_ended(job_id: str, state: JobState) -> None:
    if state.has_ended:
        raise JobEnded(f"job {job_id} has ended: it is {state}")


def _insert_shards(connection: Connection, job_id: str, new_shards: Sequence[NewShard]) -> None:
    rows = [asdict(shard) | {"id": shard_id_of(job_id, shard.number), "job_id": job_id} for shard in new_shards]
    if rows:
        # Counted as enqueued: the producer is about to, and if it dies the sweeper makes up for it.
        queued = insert(shards).values(state=ShardState.QUEUED, num_attempts=0, enqueued_at=now())
        connection.execute(queued, rows)


def _family(job_id: str, number: int) -> Select[tuple[str]]:
    """A shard of a job and those that try its rows again."""
    same_rows = or_(shards.c.number == number, shards.c.retry_of == number)
    return select(shards.c.id).where(shards.c.job_id == job_id, same_rows)
