"""The ledger: which jobs there are, who may work on which shard, and which rows are done. The only truth."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict
from typing import Any

from sqlalchemy import Connection, Select, bindparam, delete, func, insert, or_, select, true, update

from .clock import now
from .database import Database
from .errors import LeaseLost, UnknownJob
from .migrate import migrate
from .records import (
    AttemptOutcome,
    AttemptRecord,
    Claim,
    JobRecord,
    JobState,
    NewJob,
    NewPart,
    NewShard,
    PartRecord,
    Progress,
    ShardRecord,
    ShardState,
    shard_id_of,
)
from .tables import attempts, jobs, parts, shards


class Ledger:
    """All SQL of headrace. One object serves all threads of a process; every method is one transaction.

    Every method raises LedgerUnavailable when the database does not answer and LedgerError when it refuses.
    """

    def __init__(self, database_url: str) -> None:
        self._database = Database(database_url)

    def migrate(self) -> None:
        """Create or upgrade the schema. Safe when several processes call it; quick when up to date."""
        migrate(self._database)

    def close(self) -> None:
        self._database.close()

    # A job is created, watched and cancelled here; the methods after these belong to workers.

    def create_job(self, job: NewJob, new_shards: Sequence[NewShard]) -> None:
        """Record a job as running, or as completed when it has no shards."""
        rows = [asdict(shard) | {"id": shard_id_of(job.id, shard.number), "job_id": job.id} for shard in new_shards]
        state = JobState.RUNNING if rows else JobState.COMPLETED
        finished_at = None if rows else now()
        with self._database.write() as connection:
            connection.execute(
                insert(jobs).values(**asdict(job), state=state, created_at=now(), finished_at=finished_at)
            )
            if rows:
                # Counted as enqueued: the producer is about to, and if it dies the sweeper makes up for it.
                queued = insert(shards).values(state=ShardState.QUEUED, num_attempts=0, enqueued_at=now())
                connection.execute(queued, rows)

    def job(self, job_id: str) -> JobRecord:
        """Raises UnknownJob."""
        with self._database.read() as connection:
            row = connection.execute(select(jobs).where(jobs.c.id == job_id)).one_or_none()
        if row is None:
            raise UnknownJob(f"job {job_id!r} is unknown: `headrace jobs` lists those there are")
        return JobRecord(**row._mapping)

    def jobs(self, limit: int = 20) -> list[JobRecord]:
        """The newest first."""
        newest = select(jobs).order_by(jobs.c.created_at.desc(), jobs.c.id.desc()).limit(limit)
        with self._database.read() as connection:
            return [JobRecord(**row._mapping) for row in connection.execute(newest)]

    def cancel_job(self, job_id: str) -> JobState:
        """Stop a running job: no claim, renewal or commit of it succeeds after this. Returns its state.

        A job that is no longer running stays as it is. Raises UnknownJob.
        """
        cancelled = update(jobs).values(state=JobState.CANCELLED, finished_at=now())
        with self._database.write() as connection:
            connection.execute(cancelled.where(jobs.c.id == job_id, jobs.c.state == JobState.RUNNING))
        return self.job(job_id).state

    def progress(self, job_id: str) -> Progress:
        """Raises UnknownJob."""
        with self._database.read() as connection:
            row = connection.execute(_progress_of(job_id)).one_or_none()
        if row is None:
            raise UnknownJob(f"job {job_id!r} is unknown: `headrace jobs` lists those there are")
        return Progress(**row._mapping)

    def shards(self, job_id: str) -> list[ShardRecord]:
        """All shards of a job, by number."""
        of_job = select(shards).where(shards.c.job_id == job_id).order_by(shards.c.number)
        with self._database.read() as connection:
            return [ShardRecord(**row._mapping) for row in connection.execute(of_job)]

    def attempts(self, shard_id: str) -> list[AttemptRecord]:
        """All attempts at a shard, oldest first."""
        of_shard = select(attempts).where(attempts.c.shard_id == shard_id).order_by(attempts.c.number)
        with self._database.read() as connection:
            return [AttemptRecord(**row._mapping) for row in connection.execute(of_shard)]

    def parts(self, job_id: str, shard_number: int | None = None) -> list[PartRecord]:
        """The committed parts of a job or of one of its shards, in the order of their commits."""
        of_job = select(parts).where(parts.c.job_id == job_id).order_by(parts.c.id)
        if shard_number is not None:
            of_job = of_job.where(parts.c.shard_id == shard_id_of(job_id, shard_number))
        with self._database.read() as connection:
            return [PartRecord(**row._mapping) for row in connection.execute(of_job)]

    # An attempt: claim, renew while it lasts, commit parts, then finish or release.

    def claim(self, shard_id: str, owner: str, lease_seconds: float) -> Claim | None:
        """Take a shard that is queued, or running under a lease that ran out; None if it is neither."""
        free = or_(
            shards.c.state == ShardState.QUEUED,
            (shards.c.state == ShardState.RUNNING) & (shards.c.lease_expires_at < now()),
        )
        take = (
            update(shards)
            .where(shards.c.id == shard_id, free, shards.c.job_id.in_(_running_jobs()))
            .values(
                state=ShardState.RUNNING,
                num_attempts=shards.c.num_attempts + 1,
                lease_owner=owner,
                lease_expires_at=now() + lease_seconds,
            )
            .returning(shards)
        )
        with self._database.write() as connection:
            row = connection.execute(take).one_or_none()
            if row is None:
                return None
            shard = ShardRecord(**row._mapping)
            attempt_id = _start_attempt(connection, shard, owner)
        return Claim(
            shard_id=shard.id,
            job_id=shard.job_id,
            shard_number=shard.number,
            attempt_id=attempt_id,
            attempt_number=shard.num_attempts,
            owner=owner,
            num_rows=shard.num_rows,
            spool_path=shard.spool_path,
        )

    def renew(self, owner: str, attempt_ids: Collection[int], lease_seconds: float) -> set[int]:
        """Extend the leases of `attempt_ids` from now; returns the ids of those that `owner` still holds.

        A lease that ran out but that nobody has taken since is extended too.
        """
        if not attempt_ids:
            return set()
        held = (
            update(shards)
            .where(shards.c.attempt_id.in_(attempt_ids), shards.c.lease_owner == owner)
            .where(shards.c.state == ShardState.RUNNING, shards.c.job_id.in_(_running_jobs()))
            .values(lease_expires_at=now() + lease_seconds)
            .returning(shards.c.attempt_id)
        )
        with self._database.write() as connection:
            return set(connection.scalars(held))

    def commit_part(self, claim: Claim, part: NewPart) -> None:
        """Record a part whose file is synced under its temporary name. Raises LeaseLost.

        Calling it again for the same file changes nothing, so a call whose answer was lost can be repeated.
        """
        with self._database.write() as connection:
            _hold(connection, claim)
            same_file = select(parts.c.id).where(parts.c.job_id == claim.job_id, parts.c.file_name == part.file_name)
            if connection.scalar(same_file.where(parts.c.attempt_id == claim.attempt_id)) is None:
                _insert_part(connection, claim, part)

    def drop_part(self, claim: Claim, part_id: int) -> None:
        """Forget a part whose file is gone, so that its rows are generated again. Raises LeaseLost."""
        with self._database.write() as connection:
            _hold(connection, claim)
            of_shard = delete(parts).where(parts.c.shard_id == claim.shard_id)
            connection.execute(of_shard.where(parts.c.id == part_id))

    def finish_shard(self, claim: Claim) -> JobState:
        """Mark the shard done, and its job completed if it was the last. Raises LeaseLost.

        Calling it again for the same claim changes nothing.
        """
        with self._database.write() as connection:
            if not _is_finished(connection, claim):
                _hold(connection, claim)
                _end_lease(connection, claim, ShardState.DONE)
                _end_attempt(connection, claim.attempt_id, AttemptOutcome.DONE)
            return _complete_job(connection, claim.job_id)

    def release(self, claim: Claim, error: str | None = None) -> None:
        """Hand the shard back as queued; does nothing if the lease is lost.

        Without an error `unclaimed` offers it at once. With one it waits there like a lost message does, so
        that a full disk is not tried in a tight loop, and the error becomes the job's.
        """
        with self._database.write() as connection:
            if not _is_held(connection, claim):
                return
            _end_lease(connection, claim, ShardState.QUEUED, enqueued_at=None if error is None else now())
            outcome = AttemptOutcome.RELEASED if error is None else AttemptOutcome.FAILED
            _end_attempt(connection, claim.attempt_id, outcome, error)
            if error is not None:
                connection.execute(update(jobs).where(jobs.c.id == claim.job_id).values(error=error))

    # What the sweeper does, and what it and producers tell about messages.

    def requeue_expired(self, queue: str) -> list[str]:
        """Put shards back whose lease ran out, as if just enqueued; returns their ids, to be sent again."""
        expired = _shards_on(queue, ShardState.RUNNING).where(shards.c.lease_expires_at < now())
        put_back = (
            update(shards)
            .where(shards.c.id.in_(select(expired.cte().c.id)))
            .values(state=ShardState.QUEUED, lease_owner=None, lease_expires_at=None, enqueued_at=now())
            .returning(shards.c.id, shards.c.attempt_id)
        )
        with self._database.write() as connection:
            rows = connection.execute(put_back).all()
            for _, attempt_id in rows:
                _end_attempt(connection, attempt_id, AttemptOutcome.LOST)
        return sorted(shard_id for shard_id, _ in rows)

    def unclaimed(self, queue: str, older_than_seconds: float, limit: int) -> list[str]:
        """Queued shards whose last message is older, or that have none; stamps them as enqueued now.

        Returns at most `limit` ids, those that have waited longest, to be sent again.
        """
        waiting = (
            _shards_on(queue, ShardState.QUEUED)
            .where(or_(shards.c.enqueued_at.is_(None), shards.c.enqueued_at <= now() - older_than_seconds))
            .order_by(shards.c.enqueued_at.nulls_first(), shards.c.id)
            .limit(limit)
        )
        stamp = (
            update(shards)
            .where(shards.c.id.in_(select(waiting.cte().c.id)))
            .values(enqueued_at=now())
            .returning(shards.c.id)
        )
        with self._database.write() as connection:
            return sorted(connection.scalars(stamp))

    def mark_enqueued(self, shard_ids: Iterable[str]) -> None:
        """Note that a message for each of these shards was sent now."""
        rows = [{"shard_id": shard_id} for shard_id in shard_ids]
        stamp = update(shards).where(shards.c.id == bindparam("shard_id")).values(enqueued_at=now())
        if rows:
            with self._database.write() as connection:
                connection.execute(stamp, rows)


def _running_jobs() -> Select[tuple[str]]:
    return select(jobs.c.id).where(jobs.c.state == JobState.RUNNING)


def _shards_on(queue: str, state: ShardState) -> Select[tuple[str]]:
    """Ids of a queue's shards in a state, each locked, leaving out those another transaction has locked."""
    return (
        select(shards.c.id)
        .join(jobs, jobs.c.id == shards.c.job_id)
        .where(jobs.c.queue == queue, jobs.c.state == JobState.RUNNING, shards.c.state == state)
        .with_for_update(of=shards, skip_locked=True, key_share=True)
    )


def _progress_of(job_id: str) -> Select[Any]:
    sums = {
        "rows_done": parts.c.num_rows,
        "rows_failed": parts.c.num_failed,
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
    job = (jobs.c.id.label("job_id"), jobs.c.state, jobs.c.num_rows.label("rows_total"), jobs.c.error)
    joined = jobs.join(done_parts, true()).join(job_shards, true())
    return select(*job, done_parts, job_shards).select_from(joined).where(jobs.c.id == job_id)


def _start_attempt(connection: Connection, shard: ShardRecord, owner: str) -> int:
    if shard.attempt_id is not None:
        _end_attempt(connection, shard.attempt_id, AttemptOutcome.LOST)
    started = insert(attempts).values(shard_id=shard.id, number=shard.num_attempts, owner=owner, started_at=now())
    attempt_id: int = connection.scalars(started.returning(attempts.c.id)).one()
    connection.execute(update(shards).where(shards.c.id == shard.id).values(attempt_id=attempt_id))
    first = update(jobs).where(jobs.c.id == shard.job_id, jobs.c.started_at.is_(None))
    connection.execute(first.values(started_at=now()))
    return attempt_id


def _is_held(connection: Connection, claim: Claim) -> bool:
    """Whether the claim's attempt still owns its shard; locks the shard against a takeover if so.

    A lease that ran out still counts until somebody takes it: nobody else can have committed before that.
    """
    held = (
        select(shards.c.id)
        .join(jobs, jobs.c.id == shards.c.job_id)
        .where(shards.c.id == claim.shard_id, shards.c.attempt_id == claim.attempt_id)
        .where(shards.c.state == ShardState.RUNNING, jobs.c.state == JobState.RUNNING)
        .with_for_update(of=shards, key_share=True)
    )
    return connection.scalar(held) is not None


def _hold(connection: Connection, claim: Claim) -> None:
    if not _is_held(connection, claim):
        raise LeaseLost(f"attempt {claim.attempt_number} at shard {claim.shard_id} has lost its lease")


def _insert_part(connection: Connection, claim: Claim, part: NewPart) -> None:
    owned = {"job_id": claim.job_id, "shard_id": claim.shard_id, "attempt_id": claim.attempt_id}
    connection.execute(insert(parts).values(**asdict(part), **owned, committed_at=now()))


def _end_lease(connection: Connection, claim: Claim, state: ShardState, **values: Any) -> None:
    ended = update(shards).where(shards.c.id == claim.shard_id)
    connection.execute(ended.values(state=state, lease_owner=None, lease_expires_at=None, **values))


def _end_attempt(connection: Connection, attempt_id: int, outcome: AttemptOutcome, error: str | None = None) -> None:
    open_attempt = update(attempts).where(attempts.c.id == attempt_id, attempts.c.ended_at.is_(None))
    connection.execute(open_attempt.values(ended_at=now(), outcome=outcome, error=error))


def _is_finished(connection: Connection, claim: Claim) -> bool:
    shard = select(shards.c.state).where(shards.c.id == claim.shard_id)
    return connection.scalar(shard.where(shards.c.attempt_id == claim.attempt_id)) is ShardState.DONE


def _complete_job(connection: Connection, job_id: str) -> JobState:
    # Locked in a statement of its own: the next one then sees what another last shard has just committed.
    of_job = select(jobs.c.state).where(jobs.c.id == job_id)
    connection.execute(of_job.with_for_update(key_share=True))
    unfinished = select(shards.c.id).where(shards.c.job_id == job_id, shards.c.state != ShardState.DONE)
    complete = update(jobs).where(jobs.c.id == job_id, jobs.c.state == JobState.RUNNING, ~unfinished.exists())
    connection.execute(complete.values(state=JobState.COMPLETED, finished_at=now(), error=None))
    return JobState(connection.scalars(of_job).one())
