"""Who is to be told when a job or a batch has ended, and how far that is."""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, Select, and_, delete, exists, func, insert, literal, or_, select, update

from ..database import Database
from .clock import now
from .records import ENDED, AttemptOutcome, JobState, NewWebhook, WebhookState
from .tables import attempts, batches, jobs, parts, shards, webhooks

# After an attempt that failed. In all a day: who does not answer until then is not told.
_FIRST_PAUSE_SECONDS = 5.0
_PAUSE_GROWTH = 3.0
_LONGEST_PAUSE_SECONDS = 4 * 3600.0
_PATIENCE_SECONDS = 24 * 3600.0
# An attempt that has not been heard of by then died with its process.
_LEASE_SECONDS = 60.0


@dataclass(frozen=True)
class Delivery:
    """One attempt at telling. `subject_id`: the job or batch that ended, at `event_at`, in seconds since the epoch."""

    id: int
    url: str
    secret: str | None
    subject_id: str
    event_id: str
    event_type: str
    event_at: float
    num_attempts: int


_DELIVERY = (
    *(webhooks.c[name] for name in Delivery.__dataclass_fields__ if name != "subject_id"),
    func.coalesce(webhooks.c.batch_id, webhooks.c.job_id).label("subject_id"),
)


class Webhooks:
    """The ledger's webhooks. Thread-safe; every method is one transaction and raises what `Ledger`'s do."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def claim_due(self, limit: int) -> list[Delivery]:
        """What is to be told now. Nobody else gets it within a minute, in which `settle` is to be called."""
        with self._database.read() as connection:
            something = or_(exists(_due()), exists(_ended_jobs()), exists(_ended_batches()))
            if connection.execute(select(something)).scalar_one() is False:
                return []
        with self._database.write() as connection:
            for row in connection.execute(_locked(_ended_jobs(), limit)):
                _make_event(connection, row, f"job.{_outcome(row)}")
            for row in connection.execute(_locked(_ended_batches(), limit)):
                _make_event(connection, row, f"batch.{row.state}")
            due = _due().order_by(webhooks.c.next_attempt_at).limit(limit).with_for_update(skip_locked=True)
            take = update(webhooks).where(webhooks.c.id.in_(select(due.cte().c.id)))
            taken = take.values(num_attempts=webhooks.c.num_attempts + 1, next_attempt_at=now() + _LEASE_SECONDS)
            return [Delivery(**row._mapping) for row in connection.execute(taken.returning(*_DELIVERY))]

    def delivered(self, delivery: Delivery) -> None:
        """Note that the receiver has it."""
        self._settle(delivery, state=WebhookState.DELIVERED, next_attempt_at=None, error=None)

    def failed(self, delivery: Delivery, error: str, is_final: bool = False) -> None:
        """Note that the receiver did not take it; it is tried again for a day, unless this `is_final`."""
        pause = min(_LONGEST_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * _PAUSE_GROWTH ** (delivery.num_attempts - 1))
        with self._database.read() as connection:
            at: float = connection.execute(select(now() + pause)).scalar_one()
        if is_final or at > delivery.event_at + _PATIENCE_SECONDS:
            self._settle(delivery, state=WebhookState.FAILED, next_attempt_at=None, error=error)
        else:
            self._settle(delivery, next_attempt_at=at, error=error)

    def of_job(self, job_id: str) -> list[tuple[WebhookState, str | None]]:
        """How far the telling of a job's end is: each webhook's state and last error."""
        return self._states("job_id", job_id)

    def urls_of_job(self, job_id: str) -> list[str]:
        """Where a job's end is told."""
        of_job = select(webhooks.c.url).where(webhooks.c.job_id == job_id).order_by(webhooks.c.id)
        with self._database.read() as connection:
            return list(connection.execute(of_job).scalars())

    def of_batch(self, batch_id: str) -> list[tuple[WebhookState, str | None]]:
        """As `of_job`, of a batch's end."""
        return self._states("batch_id", batch_id)

    def _states(self, column: str, subject_id: str) -> list[tuple[WebhookState, str | None]]:
        of_subject = select(webhooks.c.state, webhooks.c.error).where(webhooks.c[column] == subject_id)
        wanted = of_subject.order_by(webhooks.c.id)
        with self._database.read() as connection:
            return [(state, error) for state, error in connection.execute(wanted)]

    def _settle(self, delivery: Delivery, **values: Any) -> None:
        same_event = update(webhooks).where(webhooks.c.id == delivery.id, webhooks.c.event_id == delivery.event_id)
        still_open = same_event.where(webhooks.c.state == WebhookState.PENDING)
        with self._database.write() as connection:
            connection.execute(still_open.values(**values))


# The ledger calls these within its own transactions.


def insert_webhook(
    connection: Connection, webhook: NewWebhook, *, job_id: str | None = None, batch_id: str | None = None
) -> None:
    """Have the end of a job or of a batch told that is recorded in the same transaction."""
    connection.execute(
        insert(webhooks).values(
            job_id=job_id,
            batch_id=batch_id,
            url=webhook.url,
            secret=webhook.secret,
            state=WebhookState.WAITING,
            num_attempts=0,
        )
    )


def reopen_webhooks(connection: Connection, job_id: str) -> None:
    """A job that had ended runs again: its next end is to be told too."""
    connection.execute(update(webhooks).where(webhooks.c.job_id == job_id).values(state=WebhookState.WAITING))


def delete_webhooks(connection: Connection, job_ids: Sequence[str]) -> None:
    connection.execute(delete(webhooks).where(webhooks.c.job_id.in_(job_ids)))


def _due() -> Select[tuple[int]]:
    is_due = and_(webhooks.c.state == WebhookState.PENDING, webhooks.c.next_attempt_at <= now())
    return select(webhooks.c.id).where(is_due)


def _locked(ended: Select[Any], limit: int) -> Select[Any]:
    return ended.limit(limit).with_for_update(of=webhooks, skip_locked=True)


def _ended_batches() -> Select[Any]:
    """Those whose batch has ended, in whichever way."""
    ends = (batches.c.completed_at, batches.c.failed_at, batches.c.expired_at, batches.c.cancelled_at)
    ended = select(webhooks.c.id, batches.c.state, func.coalesce(*ends).label("finished_at"))
    joined = ended.select_from(webhooks.join(batches, batches.c.id == webhooks.c.batch_id))
    return joined.where(webhooks.c.state == WebhookState.WAITING, func.coalesce(*ends).is_not(None))


def _ended_jobs() -> Select[Any]:
    """Those whose job has ended, and what decides how the event is called."""
    counts = select(func.coalesce(func.sum(parts.c.num_failed), 0)).where(parts.c.job_id == jobs.c.id)
    too_late = (
        select(literal(1))
        .select_from(attempts.join(shards, shards.c.id == attempts.c.shard_id))
        .where(shards.c.job_id == jobs.c.id, attempts.c.outcome == AttemptOutcome.DONE)
        .where(attempts.c.ended_at > jobs.c.deadline_at)
    )
    columns = (webhooks.c.id, jobs.c.state, jobs.c.finished_at, jobs.c.num_rows)
    ended = select(*columns, counts.scalar_subquery().label("num_failed"), exists(too_late).label("is_expired"))
    joined = ended.select_from(webhooks.join(jobs, jobs.c.id == webhooks.c.job_id))
    has_ended = jobs.c.state.in_(ENDED)
    return joined.where(webhooks.c.state == WebhookState.WAITING, has_ended)


def _make_event(connection: Connection, row: Row[Any], event_type: str) -> None:
    event = {"event_id": f"evt_{uuid.uuid4().hex}", "event_type": event_type, "event_at": row.finished_at}
    made = update(webhooks).where(webhooks.c.id == row.id)
    values = {"state": WebhookState.PENDING, "num_attempts": 0, "next_attempt_at": row.finished_at, "error": None}
    connection.execute(made.values(**event, **values))


def _outcome(row: Row[Any]) -> str:
    """How a job has ended; `failed` is one none of whose rows has an answer."""
    if row.state is JobState.CANCELLED:
        return "cancelled"
    if row.is_expired and row.num_failed:
        return "expired"
    return "failed" if row.num_rows and row.num_failed == row.num_rows else "completed"
