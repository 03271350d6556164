"""Who holds a shard: an attempt claims it, renews while it lasts, commits parts, then finishes or releases.

A method of `Leases` is a transaction, a function is part of its caller's. What every shard takes is made as a statement
once, as that takes longer than to run it.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from itertools import takewhile
from types import MappingProxyType
from typing import Any

from sqlalchemy import ColumnElement, Connection, Insert, Select, Update, bindparam, delete, insert, select, update
from sqlalchemy.sql.dml import ReturningInsert, ReturningUpdate

from ..database import Database, InTransaction
from ..errors import LeaseLost
from .claim_order import lock_next_shard
from .clock import now
from .records import OPEN, AttemptOutcome, Claim, JobState, NewPart, Replacement, ShardRecord, ShardState
from .tables import attempts, jobs, parts, shards
from .tidying import TIDY_SECONDS

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

    def has_unexpired(self, job_id: str) -> bool:
        """Whether an attempt at one of the job's shards holds a lease that has not run out, by the database's clock."""
        held = select(shards.c.id).where(shards.c.job_id == job_id, shards.c.state == ShardState.RUNNING)
        with self._database.read() as connection:
            return connection.scalar(held.where(shards.c.lease_expires_at > now()).limit(1)) is not None

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
        merging: Sequence[str] = (),
    ) -> None:
        """Record a part whose file is synced under its temporary name. Raises LeaseLost.

        In the same transaction the parts `replacing` names go, each for what stays of it, written like the part, those
        `merging` names go, of the same shard, whose rows are in the part, and `also` is done, which has to bear
        repetition.
        Calling it again for the same file changes nothing, so a call whose answer was lost can be repeated.
        """
        with self._database.write() as connection:
            if also is not None:
                # First: should it have to wait for somebody, no lease waits for us.
                also(connection)
            _hold(connection, claim)
            if not _is_committed(connection, claim, part):
                _insert_part(connection, part, claim, claim.shard_id)
                for replacement in replacing:
                    _replace_part(connection, claim, replacement)
                if merging:
                    _drop_merged(connection, claim, merging)

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
            if _is_held(connection, claim):
                _end_lease(connection, claim, ShardState.DONE)
                end_attempt(connection, claim.attempt_id, AttemptOutcome.DONE)
            elif not _is_finished(connection, claim):
                raise _lost(claim)
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
    lease = {"shard_id": shard_id, "lease_owner": owner, "lease_seconds": lease_seconds}
    if (row := connection.execute(_taken(), lease).one_or_none()) is None:
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
        seconds_left=_start_job(connection, shard.job_id),
    )


@cache
def _taken() -> ReturningUpdate[Any]:
    """Parameters that are named like columns are what these are set to, here and below."""
    queued = update(shards).where(shards.c.id == bindparam("shard_id"), shards.c.state == ShardState.QUEUED)
    lease = {"state": ShardState.RUNNING, "lease_expires_at": now() + bindparam("lease_seconds"), "retry_at": None}
    taken = queued.where(of_running_job()).values(num_attempts=shards.c.num_attempts + 1, **lease)
    return taken.returning(shards)


def _start_attempt(connection: Connection, shard: ShardRecord, owner: str) -> int:
    begun = {"shard_id": shard.id, "number": shard.num_attempts, "owner": owner}
    attempt_id: int = connection.scalars(_started(), begun).one()
    connection.execute(_changed_shard(), {"shard_id": shard.id, "attempt_id": attempt_id})
    return attempt_id


@cache
def _started() -> ReturningInsert[int]:
    return insert(attempts).values(started_at=now()).returning(attempts.c.id)


@cache
def _changed_shard() -> Update:
    return update(shards).where(shards.c.id == bindparam("shard_id"))


def _start_job(connection: Connection, job_id: str) -> float | None:
    """Note that a job has begun, if that is not noted; returns the seconds until its deadline."""
    of_job = {"job_id": job_id}
    started_at, seconds_left = connection.execute(_begun(), of_job).one()
    if started_at is None:
        first = update(jobs).where(jobs.c.id == job_id, jobs.c.started_at.is_(None))
        connection.execute(first.values(started_at=now()))
    return seconds_left


@cache
def _begun() -> Select[float, float]:
    return select(jobs.c.started_at, jobs.c.deadline_at - now()).where(jobs.c.id == bindparam("job_id"))


def _is_held(connection: Connection, claim: Claim) -> bool:
    """Whether the claim's attempt still owns its shard; locks the shard against a takeover if so.

    A lease that ran out still counts until somebody takes it: nobody else can have committed before that.
    """
    of_attempt = {"shard_id": claim.shard_id, "attempt_id": claim.attempt_id}
    return connection.scalar(_held(), of_attempt) is not None


@cache
def _held() -> Select[str]:
    return (
        select(shards.c.id)
        .join(jobs, jobs.c.id == shards.c.job_id)
        .where(shards.c.id == bindparam("shard_id"), shards.c.attempt_id == bindparam("attempt_id"))
        .where(shards.c.state == ShardState.RUNNING, jobs.c.state.in_(OPEN))
        .with_for_update(of=shards, key_share=True)
    )


def _hold(connection: Connection, claim: Claim) -> None:
    if not _is_held(connection, claim):
        raise _lost(claim)


def _lost(claim: Claim) -> LeaseLost:
    return LeaseLost(f"attempt {claim.attempt_number} at shard {claim.shard_id} has lost its lease")


def _is_committed(connection: Connection, claim: Claim, part: NewPart) -> bool:
    of_part = {"job_id": claim.job_id, "file_name": part.file_name, "attempt_id": claim.attempt_id}
    return connection.scalar(_committed(), of_part) is not None


@cache
def _committed() -> Select[int]:
    same_file = select(parts.c.id).where(parts.c.job_id == bindparam("job_id"))
    same_file = same_file.where(parts.c.file_name == bindparam("file_name"))
    return same_file.where(parts.c.attempt_id == bindparam("attempt_id"))


def _insert_part(connection: Connection, part: NewPart, claim: Claim, shard_id: str) -> None:
    owned = {"job_id": claim.job_id, "shard_id": shard_id, "attempt_id": claim.attempt_id}
    connection.execute(_inserted_part(), asdict(part) | owned)


@cache
def _inserted_part() -> Insert:
    return insert(parts).values(committed_at=now())


def _replace_part(connection: Connection, claim: Claim, replacement: Replacement) -> None:
    """The rest stays the shard's whose part it was; its attempt is the one that wrote the file."""
    gone = delete(parts).where(parts.c.id == replacement.old.id, parts.c.job_id == claim.job_id)
    shard_id = connection.scalars(gone.returning(parts.c.shard_id)).one()
    if replacement.rest is not None:
        _insert_part(connection, replacement.rest, claim, shard_id)


def _drop_merged(connection: Connection, claim: Claim, file_names: Collection[str]) -> None:
    of_shard = delete(parts).where(parts.c.shard_id == claim.shard_id)
    num_gone = connection.execute(of_shard.where(parts.c.file_name.in_(file_names))).rowcount
    assert num_gone == len(file_names)


def _end_lease(connection: Connection, claim: Claim, state: ShardState, **values: Any) -> None:
    ended = {"shard_id": claim.shard_id, "state": state, "lease_owner": None, "lease_expires_at": None}
    connection.execute(_changed_shard().values(**values) if values else _changed_shard(), ended)


def end_attempt(connection: Connection, attempt_id: int, outcome: AttemptOutcome, error: str | None = None) -> None:
    connection.execute(_ended_attempt(), {"attempt_id": attempt_id, "outcome": outcome, "error": error})


@cache
def _ended_attempt() -> Update:
    open_attempt = update(attempts).where(attempts.c.id == bindparam("attempt_id"), attempts.c.ended_at.is_(None))
    return open_attempt.values(ended_at=now())


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
    """Complete it if nothing of it is unfinished; returns its state."""
    of_job: dict[str, Any] = {"job_id": job_id}
    # Locked in a statement of its own: the next one then sees what another last shard has just committed.
    state: JobState = connection.scalars(_locked_state(), of_job).one()
    is_completed = connection.execute(_completed(), of_job | {"tidy_seconds": TIDY_SECONDS}).rowcount > 0
    return JobState.COMPLETED if is_completed else state


@cache
def _locked_state() -> Select[Any]:
    return select(jobs.c.state).where(jobs.c.id == bindparam("job_id")).with_for_update(key_share=True)


@cache
def _completed() -> Update:
    unfinished = select(shards.c.id).where(shards.c.job_id == bindparam("job_id"), shards.c.state.in_(_UNFINISHED))
    open_job = update(jobs).where(jobs.c.id == bindparam("job_id"), jobs.c.state.in_(OPEN), ~unfinished.exists())
    completed = {"state": JobState.COMPLETED, "finished_at": now(), "tidy_at": now() + bindparam("tidy_seconds")}
    return open_job.values(**completed, error=None)
