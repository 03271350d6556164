"""The ledger: which jobs there are, who may work on which shard, and which rows are done. The only truth."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict
from itertools import takewhile
from typing import Any

from sqlalchemy import Connection, Select, bindparam, case, delete, func, insert, or_, select, true, update

from .clock import now
from .database import Database
from .errors import JobEnded, LeaseLost, UnknownJob
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
    Replacement,
    ShardRecord,
    ShardState,
    shard_id_of,
)
from .tables import attempts, jobs, parts, shards

# A shard that fails again and again is tried again after 2, 4, 8, … seconds, and every minute in the end.
_FIRST_PAUSE_SECONDS = 2.0
_LONGEST_PAUSE_SECONDS = 60.0


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
        state = JobState.RUNNING if new_shards else JobState.COMPLETED
        finished_at = None if new_shards else now()
        values = asdict(job)
        within_seconds = values.pop("within_seconds")
        deadline_at = None if within_seconds is None else now() + within_seconds
        with self._database.write() as connection:
            recorded = insert(jobs).values(**values, state=state, created_at=now(), finished_at=finished_at)
            connection.execute(recorded.values(deadline_at=deadline_at))
            _insert_shards(connection, job.id, new_shards)

    def job(self, job_id: str) -> JobRecord:
        """Raises UnknownJob."""
        with self._database.read() as connection:
            row = connection.execute(select(jobs).where(jobs.c.id == job_id)).one_or_none()
        if row is None:
            raise _unknown(job_id)
        return JobRecord(**row._mapping)

    def jobs(self, limit: int = 20) -> list[JobRecord]:
        """The newest first."""
        newest = select(jobs).order_by(jobs.c.created_at.desc(), jobs.c.id.desc()).limit(limit)
        with self._database.read() as connection:
            return [JobRecord(**row._mapping) for row in connection.execute(newest)]

    def job_of_key(self, idempotency_key: str) -> JobRecord | None:
        """The job that was recorded with this key."""
        with self._database.read() as connection:
            row = connection.execute(select(jobs).where(jobs.c.idempotency_key == idempotency_key)).one_or_none()
        return None if row is None else JobRecord(**row._mapping)

    def cancel_job(self, job_id: str) -> JobState:
        """Stop a running or paused job: no claim, renewal or commit of it succeeds after this. Returns its state.

        A job that has ended stays as it is. Raises UnknownJob.
        """
        return self._change_state(job_id, _OPEN, state=JobState.CANCELLED, finished_at=now())

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
        self.mark_enqueued(queued)
        return queued

    def retry_job(self, job_id: str, new_shards: Sequence[NewShard]) -> bool:
        """Make a completed job run again with these shards added, without its deadline; returns whether it was one."""
        again = update(jobs).where(jobs.c.id == job_id, jobs.c.state == JobState.COMPLETED)
        with self._database.write() as connection:
            running = again.values(state=JobState.RUNNING, finished_at=None, deadline_at=None).returning(jobs.c.id)
            if connection.scalar(running) is None:
                return False
            _insert_shards(connection, job_id, new_shards)
        return True

    def delete_job(self, job_id: str) -> None:
        """Forget a job with all that belongs to it. Raises UnknownJob."""
        of_job = select(shards.c.id).where(shards.c.job_id == job_id)
        with self._database.write() as connection:
            connection.execute(delete(parts).where(parts.c.job_id == job_id))
            connection.execute(delete(attempts).where(attempts.c.shard_id.in_(of_job)))
            connection.execute(delete(shards).where(shards.c.job_id == job_id))
            if connection.execute(delete(jobs).where(jobs.c.id == job_id)).rowcount == 0:
                raise _unknown(job_id)

    def _change_state(self, job_id: str, before: Collection[JobState], **values: Any) -> JobState:
        """Change a job that is in one of the states `before`; returns the state it then has. Raises UnknownJob."""
        with self._database.write() as connection:
            connection.execute(update(jobs).where(jobs.c.id == job_id, jobs.c.state.in_(before)).values(**values))
        return self.job(job_id).state

    def progress(self, job_id: str) -> Progress:
        """Raises UnknownJob."""
        with self._database.read() as connection:
            row = connection.execute(_progress_of(job_id)).one_or_none()
        if row is None:
            raise _unknown(job_id)
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

    def retried_parts(self, job_id: str, retry_of: int) -> list[PartRecord]:
        """The committed parts of a shard and of all that try its rows again, in the order of their commits."""
        of_family = select(parts).where(parts.c.shard_id.in_(_family(job_id, retry_of))).order_by(parts.c.id)
        with self._database.read() as connection:
            return [PartRecord(**row._mapping) for row in connection.execute(of_family)]

    def retrying_attempts(self, job_id: str, retry_of: int) -> set[int]:
        """The ids of all attempts at a shard and at those that try its rows again."""
        of_family = select(attempts.c.id).where(attempts.c.shard_id.in_(_family(job_id, retry_of)))
        with self._database.read() as connection:
            return set(connection.scalars(of_family))

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
                retry_at=None,
            )
            .returning(shards)
        )
        with self._database.write() as connection:
            row = connection.execute(take).one_or_none()
            if row is None:
                return None
            shard = ShardRecord(**row._mapping)
            attempt_id = _start_attempt(connection, shard, owner)
            is_expired = connection.scalar(select(jobs.c.deadline_at < now()).where(jobs.c.id == shard.job_id))
        return Claim(
            shard_id=shard.id,
            job_id=shard.job_id,
            shard_number=shard.number,
            attempt_id=attempt_id,
            attempt_number=shard.num_attempts,
            owner=owner,
            num_rows=shard.num_rows,
            spool_path=shard.spool_path,
            retry_of=shard.retry_of,
            is_expired=bool(is_expired),
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

    def begin_trial(self, claim: Claim, rows: Sequence[int]) -> None:
        """Note, before the engine gets them, which rows the attempt tries apart from all others. Raises LeaseLost."""
        with self._database.write() as connection:
            _hold(connection, claim)
            attempt = update(attempts).where(attempts.c.id == claim.attempt_id)
            connection.execute(attempt.values(trial_rows=list(rows)))

    def commit_part(self, claim: Claim, part: NewPart, replacing: Sequence[Replacement] = ()) -> None:
        """Record a part whose file is synced under its temporary name. Raises LeaseLost.

        In the same transaction the parts `replacing` names go, each for what stays of it, written like the part.
        Calling it again for the same file changes nothing, so a call whose answer was lost can be repeated.
        """
        with self._database.write() as connection:
            _hold(connection, claim)
            same_file = select(parts.c.id).where(parts.c.job_id == claim.job_id, parts.c.file_name == part.file_name)
            if connection.scalar(same_file.where(parts.c.attempt_id == claim.attempt_id)) is None:
                _insert_part(connection, claim, part)
                for replacement in replacing:
                    _replace_part(connection, claim, replacement)

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
        """Hand the shard back as queued. If the lease is lost, only note that its worker lives.

        Without an error `unclaimed` offers it at once. With one it waits until `due_retries` offers it, longer each
        time it fails in a row, and the error becomes the job's.
        """
        with self._database.write() as connection:
            if not _is_held(connection, claim):
                _acquit(connection, claim.attempt_id)
            elif error is None:
                _end_lease(connection, claim, ShardState.QUEUED, enqueued_at=None)
                _end_attempt(connection, claim.attempt_id, AttemptOutcome.RELEASED)
            else:
                _end_attempt(connection, claim.attempt_id, AttemptOutcome.FAILED, error)
                retry_at = now() + _pause_seconds(connection, claim.shard_id)
                _end_lease(connection, claim, ShardState.QUEUED, enqueued_at=now(), retry_at=retry_at)
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

    def due_retries(self, queue: str) -> list[str]:
        """Shards that failed and whose pause is over, as if just enqueued; their ids, to be sent again."""
        due = _shards_on(queue, ShardState.QUEUED).where(shards.c.retry_at <= now())
        stamp = (
            update(shards)
            .where(shards.c.id.in_(select(due.cte().c.id)))
            .values(enqueued_at=now(), retry_at=None)
            .returning(shards.c.id)
        )
        with self._database.write() as connection:
            return sorted(connection.scalars(stamp))

    def unclaimed(self, queue: str, older_than_seconds: float, limit: int) -> list[str]:
        """Queued shards whose last message is older, or that have none; stamps them as enqueued now.

        Returns at most `limit` ids, those that have waited longest, to be sent again.
        """
        waiting = (
            _shards_on(queue, ShardState.QUEUED)
            .where(shards.c.retry_at.is_(None))
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


_OPEN = (JobState.RUNNING, JobState.PAUSED)


def _unknown(job_id: str) -> UnknownJob:
    return UnknownJob(f"job {job_id!r} is unknown: `headrace jobs` lists those there are")


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
    waiting = select(shards.c.id).where(shards.c.job_id == job_id, shards.c.retry_at.is_not(None))
    error = case((waiting.exists(), jobs.c.error)).label("error")
    job = (jobs.c.id.label("job_id"), jobs.c.state, jobs.c.num_rows.label("rows_total"), error)
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
        .where(shards.c.state == ShardState.RUNNING, jobs.c.state.in_(_OPEN))
        .with_for_update(of=shards, key_share=True)
    )
    return connection.scalar(held) is not None


def _hold(connection: Connection, claim: Claim) -> None:
    if not _is_held(connection, claim):
        raise LeaseLost(f"attempt {claim.attempt_number} at shard {claim.shard_id} has lost its lease")


def _insert_part(connection: Connection, claim: Claim, part: NewPart) -> None:
    owned = {"job_id": claim.job_id, "shard_id": claim.shard_id, "attempt_id": claim.attempt_id}
    connection.execute(insert(parts).values(**asdict(part), **owned, committed_at=now()))


def _replace_part(connection: Connection, claim: Claim, replacement: Replacement) -> None:
    """The rest stays the shard's whose part it was; its attempt is the one that wrote the file."""
    gone = delete(parts).where(parts.c.id == replacement.part_id, parts.c.job_id == claim.job_id)
    shard_id = connection.scalars(gone.returning(parts.c.shard_id)).one()
    if replacement.by is not None:
        owned = {"job_id": claim.job_id, "shard_id": shard_id, "attempt_id": claim.attempt_id}
        connection.execute(insert(parts).values(**asdict(replacement.by), **owned, committed_at=now()))


def _end_lease(connection: Connection, claim: Claim, state: ShardState, **values: Any) -> None:
    ended = update(shards).where(shards.c.id == claim.shard_id)
    connection.execute(ended.values(state=state, lease_owner=None, lease_expires_at=None, **values))


def _end_attempt(connection: Connection, attempt_id: int, outcome: AttemptOutcome, error: str | None = None) -> None:
    open_attempt = update(attempts).where(attempts.c.id == attempt_id, attempts.c.ended_at.is_(None))
    connection.execute(open_attempt.values(ended_at=now(), outcome=outcome, error=error))


def _acquit(connection: Connection, attempt_id: int) -> None:
    """An attempt whose worker was stopped or cut off for longer than its lease has crashed nothing."""
    lost = update(attempts).where(attempts.c.id == attempt_id, attempts.c.outcome == AttemptOutcome.LOST)
    connection.execute(lost.values(outcome=AttemptOutcome.RELEASED))


def _pause_seconds(connection: Connection, shard_id: str) -> float:
    """After an attempt that failed: how long until the next, by how many failed in a row."""
    ended = select(attempts.c.outcome).where(attempts.c.shard_id == shard_id).order_by(attempts.c.number.desc())
    outcomes = connection.scalars(ended.limit(10))
    num_failures = sum(1 for _ in takewhile(lambda outcome: outcome is AttemptOutcome.FAILED, outcomes))
    return min(_LONGEST_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2.0 ** (num_failures - 1))


def _is_finished(connection: Connection, claim: Claim) -> bool:
    shard = select(shards.c.state).where(shards.c.id == claim.shard_id)
    return connection.scalar(shard.where(shards.c.attempt_id == claim.attempt_id)) is ShardState.DONE


def _complete_job(connection: Connection, job_id: str) -> JobState:
    # Locked in a statement of its own: the next one then sees what another last shard has just committed.
    of_job = select(jobs.c.state).where(jobs.c.id == job_id)
    connection.execute(of_job.with_for_update(key_share=True))
    unfinished = select(shards.c.id).where(shards.c.job_id == job_id, shards.c.state != ShardState.DONE)
    complete = update(jobs).where(jobs.c.id == job_id, jobs.c.state.in_(_OPEN), ~unfinished.exists())
    connection.execute(complete.values(state=JobState.COMPLETED, finished_at=now(), error=None))
    return JobState(connection.scalars(of_job).one())
