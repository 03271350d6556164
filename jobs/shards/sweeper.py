"""What keeps shards moving when a worker dies or a message is lost: every worker looks after them all."""

import logging
import time
from dataclasses import dataclass

from celery import Celery

from ...storage.errors import LedgerUnavailable
from ...storage.ledger.ledger import Ledger
from ..broker.celery_app import RESCUE_PRIORITY, queue_is_empty, send_shards

logger = logging.getLogger(__name__)

SWEEP_SECONDS = 1.0
# A queued shard whose message is older than this, while the queue is empty, has lost its message.
_LOST_MESSAGE_SECONDS = 5.0
_SWEEP_SHARDS = 64


@dataclass
class Sweeper:
    """Puts back what a dead worker held, and rings again for shards whose message was lost.

    `lease_seconds`: after an outage of the ledger no worker is taken for dead for so long, as none could renew.
    """

    ledger: Ledger
    app: Celery
    queue: str
    lease_seconds: float = 0.0
    _none_dead_before: float = 0.0

    def sweep(self) -> None:
        """Raises `LedgerError`, or kombu's `OperationalError` when Redis is away."""
        due = self._due_retries()
        if time.monotonic() >= self._none_dead_before:
            self._put_back()
        send_shards(self.app, self.queue, due, RESCUE_PRIORITY)
        if queue_is_empty(self.app, self.queue):
            lost = self.ledger.messages.unclaimed(self.queue, _LOST_MESSAGE_SECONDS, _SWEEP_SHARDS)
            send_shards(self.app, self.queue, lost, RESCUE_PRIORITY)

    def _due_retries(self) -> list[str]:
        began = time.monotonic()
        try:
            due = self.ledger.messages.due_retries(self.queue)
        except LedgerUnavailable:
            self._none_dead_before = time.monotonic() + self.lease_seconds
            raise
        # A locked SQLite makes writers wait. Leases are renewed every third of their time.
        if time.monotonic() - began > self.lease_seconds / 3:
            self._none_dead_before = time.monotonic() + self.lease_seconds
        return due

    def _put_back(self) -> None:
        expired = self.ledger.messages.requeue_expired(self.queue)
        if expired:
            logger.warning("leases ran out, putting back: %s", ", ".join(expired))
            send_shards(self.app, self.queue, expired, RESCUE_PRIORITY)
