"""Who holds a shard: an attempt claims it, renews while it lasts, commits parts, then finishes or releases.

A method of `Leases` is a transaction, a function is part of its caller's.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from itertools import takewhile
from types import MappingProxyType
from typing import Any

from sqlalchemy import ColumnElement, Connection, delete, insert, select, update

from .claim_order import lock_next_shard
from .clock import now
from .database import Database, InTransaction
from .errors import LeaseLost
from .records import AttemptOutcome, Claim, JobState, NewPart, Replacement, ShardRecord, ShardState
from .tables import attempts, jobs, parts, shards
from .tidying import TIDY_SECONDS

OPEN = (JobState.RUNNING, JobState.PAUSED)
_UNFINISHED = (ShardState.QUEUED, ShardState.RUNNING)
# A shard that fails again and again is tried again after 2, 4, 8, … seconds, and every minute in the end.
_FIRST_PAUSE_SECONDS = 2.0
_LONGEST_PAUSE_SECONDS = 60.0
NOWHERE: Mapping[str, int] = MappingProxyType({})


class Leases:
    """The attempts at shards and what they commit. Every method is one transaction and raises what `Ledger`'s raise."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def claim_next(
        self,
        queue: str,
        owner: str,
        lease_seconds: float,
        after: Mapping[str, int] = NOWHERE,
        unwanted: Collection[str] = (),
    ) -> Claim | None:
        """Take the queued shard of this queue whose turn it is; None when there is none that is due.

        The highest priority comes first, then the tenant that holds the fewest leases for its weight, then the oldest
        job; none of the jobs `unwanted`. Of that job, the shard that follows `after[job_id]`, the number of the one
        that the worker had last; else one from which it can go on for long.
        """
        with self._database.write() as connection:
            shard_id = lock_next_shard(connection, queue, after, unwanted)
            return None if shard_id is None else take(connection, shard_id, owner, lease_seconds)

    def has_queued(self, job_id: str) -> bool:
        """Whether a running job has a shard to take, now or after a pause."""
        queued = select(shards.c.id).where(shards.c.job_id == job_id, shards.c.state == ShardState.QUEUED)
        with self._database.read() as connection:
            return connection.scalar(queued.where(of_running_job()).limit(1)) is not None

    def renew(self, owner: str, attempt_ids: Collection[int], lease_seconds: float) -> set[int]:
        """Extend the leases of `attempt_ids` from now; returns the ids of those that `owner` still holds.

        A lease that ran out but that nobody has taken since is extended too.
        """
        if not attempt_ids:
            return set()
        held = (
            update(shards)
            .where(shards.c.attempt_id.in_(attempt_ids), shards.c.lease_owner == owner)
            .where(shards.c.state == ShardState.RUNNING, of_running_job())
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

    def note_trouble(self, claim: Claim, reason: str | None) -> None:
        """Note what an attempt that has not ended waits for: it becomes the job's error until it is None again."""
        attempt = update(attempts).where(attempts.c.id == claim.attempt_id, attempts.c.ended_at.is_(None))
        with self._database.write() as connection:
            connection.execute(attempt.values(error=reason))

    def commit_part(
        self,
        claim: Claim,
        part: NewPart,
        replacing: Sequence[Replacement] = (),
        also: InTransaction | None = None,
    ) -> None:
        """Record a part whose file is synced under its temporary name. Raises LeaseLost.

        In the same transaction the parts `replacing` names go, each for what stays of it, written like the part, and
        `also` is done, which has to bear repetition.
        Calling it again for the same file changes nothing, so a call whose answer was lost can be repeated.
        """
        with self._database.write() as connection:
            if also is not None:
                # First: should it have to wait for somebody, no lease waits for us.
                also(connection)
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
                end_attempt(connection, claim.attempt_id, AttemptOutcome.DONE)
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
                end_attempt(connection, claim.attempt_id, AttemptOutcome.RELEASED)
            else:
                end_attempt(connection, claim.attempt_id, AttemptOutcome.FAILED, error)
                retry_at = now() + _pause_seconds(connection, claim.shard_id)
                _end_lease(connection, claim, ShardState.QUEUED, enqueued_at=now(), retry_at=retry_at)
                connection.execute(update(jobs).where(jobs.c.id == claim.job_id).values(error=error))


def of_running_job(queue: str | None = None) -> ColumnElement[bool]:
    """Whether a shard's job is running, and on this queue.

    As a look at one row by its id, and no join: a new PostgreSQL database knows too little of its tables to plan one.
    """
    is_running = jobs.c.state == JobState.RUNNING
    wanted = is_running if queue is None else is_running & (jobs.c.queue == queue)
    return select(wanted).where(jobs.c.id == shards.c.job_id).correlate(shards).scalar_subquery()


def take(connection: Connection, shard_id: str, owner: str, lease_seconds: float) -> Claim | None:
    """Begin an attempt at a shard that is queued; None if it is not."""
    lease = {"lease_owner": owner, "lease_expires_at": now() + lease_seconds}
    taken = update(shards).where(shards.c.id == shard_id, shards.c.state == ShardState.QUEUED)
    taken = taken.where(of_running_job())
    taken = taken.values(state=ShardState.RUNNING, num_attempts=shards.c.num_attempts + 1, retry_at=None, **lease)
    if (row := connection.execute(taken.returning(shards)).one_or_none()) is None:
        return None
    shard = ShardRecord(**row._mapping)
    return Claim(
        shard_id=shard.id,
        job_id=shard.job_id,
        shard_number=shard.number,
        attempt_id=_start_attempt(connection, shard, owner),
        attempt_number=shard.num_attempts,
        owner=owner,
        num_rows=shard.num_rows,
        spool_path=shard.spool_path,
        retry_of=shard.retry_of,
        seconds_left=connection.scalar(select(jobs.c.deadline_at - now()).where(jobs.c.id == shard.job_id)),
    )


def _start_attempt(connection: Connection, shard: ShardRecord, owner: str) -> int:
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
        .where(shards.c.state == ShardState.RUNNING, jobs.c.state.in_(OPEN))
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


def end_attempt(connection: Connection, attempt_id: int, outcome: AttemptOutcome, error: str | None = None) -> None:
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
    unfinished = select(shards.c.id).where(shards.c.job_id == job_id, shards.c.state.in_(_UNFINISHED))
    complete = update(jobs).where(jobs.c.id == job_id, jobs.c.state.in_(OPEN), ~unfinished.exists())
    completed = {"state": JobState.COMPLETED, "finished_at": now(), "tidy_at": now() + TIDY_SECONDS}
    connection.execute(complete.values(**completed, error=None))
    return JobState(connection.scalars(of_job).one())
