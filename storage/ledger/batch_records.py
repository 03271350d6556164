"""Batches of the OpenAI-compatible API: what each is, how far it is, and who brings it further."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from sqlalchemy import ColumnElement, Update, and_, insert, or_, select, update

from ..database import Database
from ..errors import UnknownBatch
from .clock import now
from .file_records import NewFile, insert_file
from .pages import by_age, follows
from .records import ENDED, NewWebhook
from .tables import batches, jobs
from .webhooks import insert_webhook


class BatchState(StrEnum):
    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"

    @property
    def has_ended(self) -> bool:
        return self in (BatchState.FAILED, BatchState.COMPLETED, BatchState.EXPIRED, BatchState.CANCELLED)


_OPEN = [state for state in BatchState if not state.has_ended]


@dataclass(frozen=True)
class NewBatch:
    """A batch to record. It expires `within_seconds` after that; its end is told to its `webhook`.

    `served_models`: what its requests may name, where the server that takes it says so, and what it means by each.
    """

    id: str
    tenant: str
    endpoint: str
    input_file_id: str
    completion_window: str
    within_seconds: float
    metadata: dict[str, str] | None = None
    output_expires_seconds: int | None = None
    webhook: NewWebhook | None = None
    served_models: Mapping[str, Mapping[str, Any]] | None = None


@dataclass(frozen=True)
class BatchRecord:
    """Times are seconds since the epoch. `ending`: why it ends before its job does, once that is decided.
    Of `served_models` earlier versions have noted the names alone.

    Counts and tokens are known once it has ended; until then its job's progress says.
    """

    id: str
    tenant: str
    state: BatchState
    endpoint: str
    input_file_id: str
    served_models: dict[str, dict[str, Any]] | list[str] | None
    completion_window: str
    metadata: dict[str, str] | None
    output_expires_seconds: int | None
    job_id: str | None
    model: str | None
    errors: list[dict[str, Any]] | None
    output_file_id: str | None
    error_file_id: str | None
    ending: BatchState | None
    created_at: float
    expires_at: float
    in_progress_at: float | None
    finalizing_at: float | None
    completed_at: float | None
    failed_at: float | None
    expired_at: float | None
    cancelling_at: float | None
    cancelled_at: float | None
    num_total: int | None
    num_completed: int | None
    num_failed: int | None
    prompt_tokens: int | None
    cached_tokens: int | None
    completion_tokens: int | None
    reasoning_tokens: int | None
    lease_owner: str | None
    lease_expires_at: float | None


@dataclass(frozen=True)
class DueBatch:
    """A batch that somebody could bring further now."""

    id: str
    tenant: str
    state: BatchState


@dataclass(frozen=True)
class BatchTotals:
    """What has become of a batch's requests: `num_failed` are the lines of its error file.

    `completion_tokens` include `reasoning_tokens`.
    """

    num_total: int
    num_completed: int
    num_failed: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int


@dataclass(frozen=True)
class BatchRecords:
    """The table of batches; every method is one transaction, and raises what `Ledger`'s methods raise.

    Whoever brings a batch further claims it first. Its steps name the owner of the lease and return whether they took
    place: not when the lease is lost, or when the batch is in another state by now.
    """

    database: Database

    def add(self, batch: NewBatch) -> BatchRecord:
        values = asdict(batch)
        expires_at = now() + values.pop("within_seconds")
        del values["webhook"]
        added = insert(batches).values(**values, state=BatchState.VALIDATING, created_at=now(), expires_at=expires_at)
        with self.database.write() as connection:
            record = _record(connection.execute(added.returning(batches)).one())
            if batch.webhook is not None:
                insert_webhook(connection, batch.webhook, batch_id=record.id)
        return record

    def get(self, tenant: str, batch_id: str) -> BatchRecord:
        """Raises UnknownBatch, also for another tenant's."""
        of_tenant = select(batches).where(batches.c.tenant == tenant, batches.c.id == batch_id)
        with self.database.read() as connection:
            row = connection.execute(of_tenant).one_or_none()
        if row is None:
            raise UnknownBatch(f"batch {batch_id!r} does not exist")
        return _record(row)

    def find(self, name: str) -> BatchRecord:
        """A batch by its id or by that of its job, whosever it is. Raises UnknownBatch."""
        named = select(batches).where(or_(batches.c.id == name, batches.c.job_id == name))
        with self.database.read() as connection:
            row = connection.execute(named).one_or_none()
        if row is None:
            raise UnknownBatch(f"batch {name!r} does not exist")
        return _record(row)

    def page(self, tenant: str, limit: int, after: str | None = None) -> list[BatchRecord]:
        """The first `limit` batches after the batch `after`, the newest first. Raises UnknownBatch."""
        wanted = select(batches).where(batches.c.tenant == tenant)
        if after is not None:
            wanted = wanted.where(follows(batches, self.get(tenant, after), newest_first=True))
        with self.database.read() as connection:
            rows = connection.execute(wanted.order_by(*by_age(batches, newest_first=True)).limit(limit))
            return [_record(row) for row in rows]

    def cancel(self, tenant: str, batch_id: str) -> BatchRecord:
        """Have a batch end that is not about to; any other stays as it is. Raises UnknownBatch."""
        cancelled = (
            update(batches)
            .where(batches.c.tenant == tenant, batches.c.id == batch_id)
            .where(batches.c.state.in_([BatchState.VALIDATING, BatchState.IN_PROGRESS]), batches.c.ending.is_(None))
            .values(state=BatchState.CANCELLING, cancelling_at=now(), ending=BatchState.CANCELLED)
        )
        with self.database.write() as connection:
            connection.execute(cancelled)
        return self.get(tenant, batch_id)

    def open_ids(self) -> set[str]:
        """The ids of the batches that have not ended: their files are yet to be written."""
        unwritten = select(batches.c.id).where(batches.c.state.in_(_OPEN))
        with self.database.read() as connection:
            return set(connection.scalars(unwritten))

    # What a keeper does.

    def due(self) -> list[DueBatch]:
        """Batches that somebody could bring further now and that nobody has a lease on, the oldest first."""
        joined = batches.outerjoin(jobs, jobs.c.id == batches.c.job_id)
        job_is_over = or_(jobs.c.id.is_(None), jobs.c.state.in_(ENDED))
        is_over = and_(
            batches.c.state == BatchState.IN_PROGRESS,
            or_(job_is_over, batches.c.expires_at <= now(), batches.c.ending.is_not(None)),
        )
        underway = [BatchState.VALIDATING, BatchState.FINALIZING, BatchState.CANCELLING]
        wanted = (
            select(batches.c.id, batches.c.tenant, batches.c.state)
            .select_from(joined)
            .where(_is_free(), or_(batches.c.state.in_(underway), is_over))
        )
        with self.database.read() as connection:
            rows = connection.execute(wanted.order_by(batches.c.created_at, batches.c.id))
            return [DueBatch(batch_id, tenant, BatchState(state)) for batch_id, tenant, state in rows]

    def claim(self, batch_id: str, owner: str, lease_seconds: float) -> BatchRecord | None:
        """Take a batch that has not ended and that nobody has a lease on; None if it is not to be had."""
        taken = update(batches).where(batches.c.id == batch_id, batches.c.state.in_(_OPEN), _is_free())
        values = {"lease_owner": owner, "lease_expires_at": now() + lease_seconds}
        with self.database.write() as connection:
            row = connection.execute(taken.values(values).returning(batches)).one_or_none()
        return None if row is None else _record(row)

    def renew(self, owner: str, batch_ids: Collection[str], lease_seconds: float) -> dict[str, BatchState]:
        """Extend the owner's leases from now; returns the batches it still holds, with their states."""
        if not batch_ids:
            return {}
        held = update(batches).where(batches.c.id.in_(batch_ids), batches.c.lease_owner == owner)
        renewed = held.values(lease_expires_at=now() + lease_seconds).returning(batches.c.id, batches.c.state)
        with self.database.write() as connection:
            return {batch_id: BatchState(state) for batch_id, state in connection.execute(renewed)}

    def release(self, batch_id: str, owner: str) -> None:
        self._step(batch_id, owner, _OPEN, lease_owner=None, lease_expires_at=None)

    def begin(self, batch_id: str, owner: str, job_id: str, model: str) -> bool:
        """Its lines are valid, and its job is recorded."""
        begun = {"state": BatchState.IN_PROGRESS, "in_progress_at": now(), "job_id": job_id, "model": model}
        return self._step(batch_id, owner, [BatchState.VALIDATING], **begun)

    def fail(self, batch_id: str, owner: str, errors: Sequence[dict[str, Any]]) -> bool:
        """It can not be run; nothing of it was."""
        failed = {"state": BatchState.FAILED, "failed_at": now(), "errors": list(errors), **_NO_LEASE}
        return self._step(batch_id, owner, _OPEN, **failed)

    def expire(self, batch_id: str, owner: str, errors: Sequence[dict[str, Any]]) -> bool:
        """Its window has closed before its lines were even looked at."""
        expired = {"state": BatchState.EXPIRED, "expired_at": now(), "errors": list(errors), **_NO_LEASE}
        return self._step(batch_id, owner, [BatchState.VALIDATING], **expired)

    def end_early(self, batch_id: str, owner: str, ending: BatchState) -> bool:
        """Its job is to be stopped."""
        return self._step(batch_id, owner, [BatchState.IN_PROGRESS], ending=ending)

    def begin_finalizing(self, batch_id: str, owner: str) -> bool:
        """Its job has ended."""
        finalizing = {"state": BatchState.FINALIZING, "finalizing_at": now()}
        return self._step(batch_id, owner, [BatchState.IN_PROGRESS], **finalizing)

    def finish(
        self,
        batch_id: str,
        owner: str,
        state: BatchState,
        output: NewFile | None,
        error: NewFile | None,
        totals: BatchTotals,
        errors: Sequence[dict[str, Any]] = (),
    ) -> bool:
        """It has ended, and these are its files, whose bytes are in place. `errors`: what is missing in them."""
        ended = _held(batch_id, owner, [BatchState.FINALIZING, BatchState.CANCELLING]).values(
            state=state,
            output_file_id=output and output.id,
            error_file_id=error and error.id,
            errors=list(errors) or None,
            **asdict(totals),
            **{f"{state}_at": now()},
            **_NO_LEASE,
        )
        with self.database.write() as connection:
            if connection.execute(ended).rowcount == 0:
                return False
            for file in (output, error):
                if file is not None:
                    insert_file(connection, file)
        return True

    def _step(self, batch_id: str, owner: str, before: Collection[BatchState], **values: Any) -> bool:
        with self.database.write() as connection:
            return connection.execute(_held(batch_id, owner, before).values(values)).rowcount == 1


_NO_LEASE = {"lease_owner": None, "lease_expires_at": None}


def _held(batch_id: str, owner: str, before: Collection[BatchState]) -> Update:
    held = update(batches).where(batches.c.id == batch_id, batches.c.lease_owner == owner)
    return held.where(batches.c.state.in_(before))


def _is_free() -> ColumnElement[bool]:
    return or_(batches.c.lease_owner.is_(None), batches.c.lease_expires_at < now())


def _record(row: Any) -> BatchRecord:
    values = dict(row._mapping)
    ending = values.pop("ending")
    return BatchRecord(
        **values | {"state": BatchState(values["state"])}, ending=None if ending is None else BatchState(ending)
    )
