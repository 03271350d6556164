"""Who brings batches further: validates the new ones and writes the files of those whose jobs have ended.

Any number of processes may do so over one ledger: each step is done under the batch's lease, and a step that was cut
short is done again by whoever comes next.
"""

import logging
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Self

from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from ...storage.errors import JobEnded, StorageError, UnknownJob
from ...storage.ledger.batch_jobs import batch_job_key
from ...storage.ledger.batch_records import BatchRecord, BatchState, BatchTotals, DueBatch
from ...storage.ledger.quotas import QuotaExceeded
from ...storage.ledger.records import JobRecord, JobState
from ..api.models import ServedModels
from ..client.client import Client
from ..embedded.valkey import EmbeddedValkeyError
from ..errors import LaterVersion
from ..periodic import Periodic
from ..shards.finishing import finish_job
from .files import FileStore
from .lines import LineError
from .output import OutputWriter
from .validation import InvalidBatch, ServedElsewhere, Validation

logger = logging.getLogger(__name__)

_TICK_SECONDS = 0.25
_SWEEP_SECONDS = 300.0
# How long leaving waits for a step under way; what is not done by then is as if the process was killed.
_LEAVE_SECONDS = 5.0
# How many tenants' batches are validated at a time, and how many finished: none waits for another's huge one.
_LANES = 3
_LONGEST_PAUSE_SECONDS = 30.0
# A batch that has not had to wait again by then was brought further, perhaps by another server.
_FORGET_SECONDS = 600.0
_NOTHING = BatchTotals(0, 0, 0, 0, 0, 0, 0)


class _Abandoned(Exception):
    """The batch is no longer ours to bring further: the lease is lost, it was cancelled, or we are to end.

    Not a `JobError`: nothing is wrong with the batch.
    """


@dataclass(frozen=True)
class _Held:
    """A batch in hand. `is_new`: it is being validated. `is_lost`: it is no longer ours."""

    is_new: bool
    is_lost: threading.Event = field(default_factory=threading.Event)


class BatchKeeper:
    """Works in threads of its own while the context lasts: some validate, some finish, each for another tenant.

    Tenants take turns; a tenant's own batches come one after the other, the oldest first. A batch that can not be
    brought further for now (disk full, Redis away) is tried again after growing pauses.
    """

    def __init__(self, client: Client, store: FileStore, validation: Validation) -> None:
        self._client = client
        self._ledger = client.ledger
        self._store = store
        self._validation = validation
        self._owner = uuid.uuid4().hex
        self._lease_seconds = client.settings.lease_seconds
        self._stopping = threading.Event()
        self._held: dict[str, _Held] = {}
        # By whether they validate, and by tenant.
        self._lanes: dict[tuple[bool, str], threading.Thread] = {}
        # When the last batch of a lane was begun.
        self._turns: dict[tuple[bool, str], float] = {}
        # Of those that had to wait: how long the next pause is, and when this one is over.
        self._pauses: dict[str, tuple[float, float]] = {}
        self._stack = ExitStack()

    @classmethod
    def of(cls, client: Client, models: ServedModels) -> Self:
        """The keeper of a server's process."""
        store = FileStore.of(client.settings, client.ledger)
        return cls(client, store, Validation(client, models, store))

    def __enter__(self) -> Self:
        for name, seconds, action in (
            ("batches", _TICK_SECONDS, self.tick),
            ("batch leases", self._lease_seconds / 3, self._renew),
            ("expired files", _SWEEP_SECONDS, self._store.sweep),
        ):
            self._stack.enter_context(Periodic(name, seconds, action))
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stopping.set()
        deadline = time.monotonic() + _LEAVE_SECONDS
        for thread in tuple(self._lanes.values()):
            thread.join(max(0.0, deadline - time.monotonic()))
        self._stack.close()

    def tick(self) -> None:
        """Begin what there is to do, as far as there is a thread for it. Raises `LedgerError`."""
        due = sorted(self._ledger.batches.due(), key=lambda batch: self._turns.get(_lane(batch), 0.0))
        for waiting in due:
            lane = _lane(waiting)
            if not self._has_room(lane) or self._is_paused(waiting.id) or self._stopping.is_set():
                continue
            batch = self._ledger.batches.claim(waiting.id, self._owner, self._lease_seconds)
            if batch is not None:
                self._held[batch.id] = _Held(is_new=waiting.state is BatchState.VALIDATING)
                thread = threading.Thread(target=self._work, args=(batch,), name=f"batch {batch.id}", daemon=True)
                self._lanes[lane], self._turns[lane] = thread, time.monotonic()
                thread.start()

    def _has_room(self, lane: tuple[bool, str]) -> bool:
        self._lanes = {busy: thread for busy, thread in self._lanes.items() if thread.is_alive()}
        return lane not in self._lanes and sum(busy[0] == lane[0] for busy in self._lanes) < _LANES

    def _is_paused(self, batch_id: str) -> bool:
        _, until = self._pauses.get(batch_id, (0.0, 0.0))
        return time.monotonic() < until

    def _renew(self) -> None:
        held = dict(self._held)
        renewed = self._ledger.batches.renew(self._owner, list(held), self._lease_seconds)
        for batch_id, batch in held.items():
            was_cancelled = batch.is_new and renewed.get(batch_id) is BatchState.CANCELLING
            if batch_id not in renewed or was_cancelled:
                batch.is_lost.set()

    def _work(self, batch: BatchRecord) -> None:
        try:
            self._advance(batch)
            self._pauses.pop(batch.id, None)
        except _Abandoned as error:
            logger.info("batch %s: %s", batch.id, error)
        except (LaterVersion, ServedElsewhere) as error:
            logger.debug("batch %s is left to another server: %s", batch.id, error)
            self._pause(batch.id)
        except (StorageError, RedisError, OperationalError, EmbeddedValkeyError) as error:
            logger.warning("batch %s has to wait: %s", batch.id, error)
            self._pause(batch.id)
        # The boundary of a batch: whatever went wrong is in the log, and it is tried again.
        except Exception:
            logger.exception("batch %s has to wait", batch.id)
            self._pause(batch.id)
        finally:
            self._held.pop(batch.id, None)
            # The lease runs out by itself.
            with suppress(StorageError):
                self._ledger.batches.release(batch.id, self._owner)

    def _pause(self, batch_id: str) -> None:
        now, (seconds, _) = time.monotonic(), self._pauses.get(batch_id, (0.5, 0.0))
        self._pauses[batch_id] = (min(2 * seconds, _LONGEST_PAUSE_SECONDS), now + seconds)
        for other, (_, until) in list(self._pauses.items()):
            if until < now - _FORGET_SECONDS:
                self._pauses.pop(other, None)

    def _advance(self, batch: BatchRecord) -> None:
        if batch.state is BatchState.VALIDATING:
            self._validate(batch)
            return
        job = self._ledger.job_of_key(batch_job_key(batch.id), batch.tenant)
        if job is None:
            self._finish_without_job(batch)
        elif job.state.has_ended or self._stop_job(batch, job):
            self._finish(batch, self._ledger.job(job.id))

    def _validate(self, batch: BatchRecord) -> None:
        try:
            job = self._validation.run(batch, self._checker(batch))
        except InvalidBatch as invalid:
            self._ledger.batches.fail(batch.id, self._owner, [error.as_dict() for error in invalid.errors])
        except (LaterVersion, QuotaExceeded, ServedElsewhere) as error:
            if batch.expires_at > time.time():
                raise
            never = LineError("batch_expired", f"The batch was not begun in time: {error}.")
            self._ledger.batches.expire(batch.id, self._owner, [never.as_dict()])
        else:
            self._ledger.batches.begin(batch.id, self._owner, job.id, self._validation.name_of(batch, job))

    def _checker(self, batch: BatchRecord) -> Callable[[], None]:
        held = self._held[batch.id]

        def check() -> None:
            if held.is_lost.is_set() or self._stopping.is_set():
                raise _Abandoned("left to whoever comes next")

        return check

    def _finish_without_job(self, batch: BatchRecord) -> None:
        if batch.state is BatchState.CANCELLING:
            self._ledger.batches.finish(batch.id, self._owner, BatchState.CANCELLED, None, None, _NOTHING)
        else:
            gone = LineError("job_deleted", "The job of this batch was deleted before the batch had ended.")
            self._ledger.batches.fail(batch.id, self._owner, [gone.as_dict()])

    def _stop_job(self, batch: BatchRecord, job: JobRecord) -> bool:
        """Have a job end now; returns whether it has. What its attempts have finished is committed first."""
        if batch.state is BatchState.IN_PROGRESS:
            self._ledger.batches.end_early(batch.id, self._owner, BatchState.EXPIRED)
        with suppress(JobEnded):
            self._ledger.pause_job(job.id)
        # An attempt may be about to hand back its shard: leases of a paused job are not renewed.
        if self._ledger.leases.has_unexpired(job.id):
            return False
        with suppress(UnknownJob):
            self._ledger.cancel_job(job.id)
        return True

    def _finish(self, batch: BatchRecord, job: JobRecord) -> None:
        if batch.state is BatchState.IN_PROGRESS:
            self._ledger.batches.begin_finalizing(batch.id, self._owner)
        # What `_stop_job` or a cancellation has decided meanwhile.
        batch = self._ledger.batches.get(batch.tenant, batch.id)
        written = OutputWriter(self._ledger, self._store, batch, job, self._checker(batch)).write()
        state = _final_state(batch, job, written.has_expired_rows)
        output, error, totals = written.output, written.error, written.totals
        is_done = self._ledger.batches.finish(batch.id, self._owner, state, output, error, totals, written.lost)
        if is_done and job.state is JobState.CANCELLED:
            finish_job(self._ledger, job)


def _lane(batch: DueBatch) -> tuple[bool, str]:
    return batch.state is BatchState.VALIDATING, batch.tenant


def _final_state(batch: BatchRecord, job: JobRecord, has_expired_rows: bool) -> BatchState:
    if batch.ending is not None:
        return batch.ending
    if has_expired_rows:
        return BatchState.EXPIRED
    return BatchState.CANCELLED if job.state is JobState.CANCELLED else BatchState.COMPLETED
