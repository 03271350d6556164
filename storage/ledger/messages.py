"""Which shards a message is to be sent for, once more: after a lost lease, a pause, or the loss of the last one."""

from collections.abc import Iterable

from sqlalchemy import Select, bindparam, or_, select, update

from ..database import Database
from .clock import now
from .leases import end_attempt, of_running_job
from .records import AttemptOutcome, ShardState
from .tables import shards


class Messages:
    """When each queued shard was last told of. Every method is one transaction and raises what `Ledger`'s raise."""

    def __init__(self, database: Database) -> None:
        self._database = database

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
                end_attempt(connection, attempt_id, AttemptOutcome.LOST)
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
            .order_by(shards.c.enqueued_at.nulls_first())
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


def _shards_on(queue: str, state: ShardState) -> Select[tuple[str]]:
    """Ids of a queue's shards in a state, each locked, leaving out those another transaction has locked."""
    found = select(shards.c.id).where(shards.c.state == state, of_running_job(queue))
    return found.with_for_update(of=shards, skip_locked=True, key_share=True)
