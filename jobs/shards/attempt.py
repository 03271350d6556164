"""One attempt at a shard: feed its rows to the engine, write what comes back as parts, commit them."""

import functools
import logging
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from ...engine.errors import ModelError
from ...engine.text.tokenizer import Tokenizer
from ...storage.errors import LeaseLost, SpoolDamaged, StorageError, UnknownJob
from ...storage.ledger.ledger import Ledger
from ...storage.ledger.records import AttemptRecord, Claim, JobRecord, JobState, PartRecord
from ...storage.output.address import open_folder
from ...storage.output.parts import recover_shard
from ...storage.output.sinks import SinkSpec
from ...storage.rows.spool import read_shard
from ..errors import Stopped
from ..hosting.cache_salts import cache_salt
from ..hosting.engine_host import EngineHost
from ..hosting.outcomes import Outcome
from ..spec.schemas import JobSpec
from ..spec.stored import read_stored
from .answer_cache import AnswerCache
from .checkpoints import Checkpoint, TokenCheckpoints
from .deadline import NOT_ANSWERED, NOT_BEGUN, Deadline
from .faults import ENGINE_FAILED, MAX_FAULTS, repeated_fault
from .isolation import ALONE, CrashHistory, EngineRoom, condemned, rows_of
from .part_writer import PartWriter
from .patience import Patience, Trouble
from .receipts import Receipts
from .retrying import Retrial
from .row_batch import RowBatch
from .row_requests import RowRequests
from .row_streams import RowStreams

logger = logging.getLogger(__name__)

# How long an attempt waits for the engine before it looks whether it is to stop.
_LOOK_SECONDS = 1.0


class Stop(threading.Event):
    """Tells an attempt to stop. `num_looks`: how often it has looked: whatever in it waits does so now and then."""

    num_looks = 0

    def is_set(self) -> bool:
        self.num_looks += 1
        return super().is_set()

    def wait(self, timeout: float | None = None) -> bool:
        self.num_looks += 1
        return super().wait(timeout)


@dataclass(frozen=True)
class AttemptTools:
    """What every attempt of a worker uses.

    `row_streams`: for rows that somebody watches. `checkpoints`: for long rows, whose tokens outlive the worker.
    `answers`: those of earlier jobs, for jobs that want them. `receipts`: what answers are stored with.
    `flush_seconds`: how long a finished row waits to be committed at most. `publish_seconds`: how long the folder may
    hide a committed one, while others of its shard come to share a file with it. `write_seconds`: how long one that
    cannot be written, as the disk is full, is kept before the shard is handed back, `store_seconds`: one that an object
    store does not take. `max_failures`: after how many attempts that ended in an engine failure the shard's open rows
    become error rows. `room`: who may use the engine.
    """

    ledger: Ledger
    host: EngineHost
    tokenizer: Tokenizer
    row_streams: RowStreams
    checkpoints: TokenCheckpoints
    answers: AnswerCache
    receipts: Receipts
    flush_seconds: float
    publish_seconds: float = 60.0
    max_failures: int = 3
    write_seconds: float = 10.0
    store_seconds: float = 600.0
    room: EngineRoom = field(default_factory=EngineRoom)


@dataclass
class ShardAttempt:
    """Runs in one thread; `stop` may be called from any. `spec`: the job's."""

    tools: AttemptTools
    claim: Claim
    job: JobRecord
    spec: JobSpec = field(init=False)
    _outcomes: "queue.SimpleQueue[list[Outcome]]" = field(default_factory=queue.SimpleQueue)
    _stop: Stop = field(default_factory=Stop)
    # Under what to keep answers, by where their rows stand in the batch.
    _cache_keys: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.spec = read_stored(JobSpec, self.job.spec)
        self._folder = open_folder(self.job.output_dir)
        self._retrial = Retrial(self.tools.ledger, self.claim, self._folder)
        self._checkpoint = Checkpoint(self.claim)
        self._deadline = Deadline.of(self.claim)
        trouble = Trouble(self.tools.ledger, self.claim)
        self._patience = Patience(trouble, self._stop, self.tools.write_seconds, self.tools.store_seconds)
        self._parts = PartWriter(
            self.tools.ledger, self.claim, self._folder, self._retrial, self._patience, SinkSpec.of(self.job.sink)
        )

    @property
    def num_looks(self) -> int:
        """Grows as long as its thread gets on."""
        return self._stop.num_looks

    def stop(self) -> None:
        """Make `run` end soon. What is finished is committed if the lease still allows it."""
        self._stop.set()
        # Wakes the thread that waits for the engine.
        self._outcomes.put([])

    def run(self) -> JobState:
        """Generate and commit the shard's open rows; returns the job's state after that.

        Raises `LeaseLost` when another attempt took over, `Stopped` when told to stop, `EngineFailed` or
        `StorageError` when the shard can be tried again. Rows committed before stay committed.
        """
        table = self._planned()
        # Not at once: a job of thousands of shards would have all of them fail, again and again.
        self._patience.with_folder(self._expect_folder)
        done = self._recover() | self._retrial.rows_to_leave(table)
        if self.claim.is_expired:
            table = condemned(table, NOT_BEGUN)
        if self.claim.attempt_number > 1:
            self._checkpoint = self.tools.checkpoints.restore(self.claim, set(table["row"].to_pylist()) - done)
        with self._parts.published(self.tools.publish_seconds):
            self._answer_all(table, done)
        state = self._patience.with_ledger(lambda: self.tools.ledger.leases.finish_shard(self.claim))
        self.tools.checkpoints.drop(self._checkpoint)
        return state

    def _planned(self) -> pa.Table:
        """The shard's rows. Raises `LeaseLost` where the job has ended since it was taken: they go with it."""
        try:
            return read_shard(Path(self.claim.spool_path))
        except SpoolDamaged as error:
            if self._has_ended():
                raise LeaseLost(f"shard {self.claim.shard_id} is not begun: its job has ended") from error
            raise

    def _has_ended(self) -> bool:
        try:
            return self.tools.ledger.job(self.claim.job_id).state.has_ended
        except UnknownJob:
            return True

    def _expect_folder(self) -> None:
        """Where it is away, rows would be answered in vain, and the parts in it forgotten that come back with it.

        Raises `OutputLost`.
        """
        if self._folder.is_bare() and not (self._folder.exists() and self._has_no_part()):
            raise self._folder.lost()

    def _has_no_part(self) -> bool:
        return not self.tools.ledger.part_names(self.claim.job_id)

    def _answer_all(self, table: pa.Table, done: frozenset[int]) -> None:
        # Nearly always the first attempt: nothing is asked of the ledger then.
        earlier = [] if self.claim.attempt_number == 1 else self.tools.ledger.attempts(self.claim.shard_id)
        history = CrashHistory.of(earlier)
        if (fault := self._repeated_fault(earlier)) is not None:
            self._answer(condemned(table, fault), done)
        elif history.asks_for_trials:
            self._answer_apart(rows_of(table, set(table["row"].to_pylist()) - done), history)
        else:
            with self.tools.room.together(self._stop):
                self._answer(table, done)

    def _repeated_fault(self, earlier: Sequence[AttemptRecord]) -> str | None:
        if len(earlier) <= MAX_FAULTS:
            return None
        return repeated_fault(earlier, self._committed())

    def _answer_apart(self, table: pa.Table, history: CrashHistory) -> None:
        """Answer some rows at a time, with nothing else in the engine, so that a crash tells whose fault it was."""
        guilty = rows_of(table, history.culprits)
        self._answer(condemned(guilty, ALONE))
        with self.tools.room.alone(self._stop):
            for group in history.groups(row for row in table["row"].to_pylist() if row not in history.culprits):
                logger.info("shard %s: trying %d rows apart", self.claim.shard_id, len(group))
                self._patience.with_ledger(functools.partial(self.tools.ledger.leases.begin_trial, self.claim, group))
                self._answer(rows_of(table, group))

    def _answer(self, table: pa.Table, done: frozenset[int] = frozenset()) -> None:
        """Have the rows of `table` answered that are not done, and commit them."""
        tools, prefix, salt = self.tools, self.claim.name, cache_salt(self.job.tenant)
        row_requests = RowRequests(self.spec, tools.tokenizer, prefix, self._checkpoint.known, salt)
        receipt = tools.receipts.of_attempt(self.claim.attempt_number, self.spec.lora)
        batch = RowBatch(table, done, row_requests, receipt)
        if batch.requests:
            self._expect_adapter()
        if self.spec.cache:
            self._cache_keys = tools.answers.answer(batch, self.spec, self.job.tenant)
        try:
            tools.host.submit_rows(batch.requests, self._outcomes.put, batch.resume_logprobs)
            with (
                tools.row_streams.offered(self.claim, batch),
                tools.checkpoints.kept(self._checkpoint, batch.all_requests),
            ):
                self._collect(batch)
        finally:
            tools.host.abort(request.request_id for request in batch.requests)

    def _expect_adapter(self) -> None:
        """The engine would refuse each row, as if it were the row's fault. Raises `AdapterMissing`."""
        if self.spec.lora is not None:
            try:
                self.spec.lora.check()
            except ModelError as error:
                raise AdapterMissing(str(error)) from error

    def _recover(self) -> frozenset[int]:
        """Finish what earlier attempts at this shard had committed; returns the rows that are done."""
        self._retrial.settle()
        # Before the first attempt there was none; to look through a folder of thousands of parts takes its time.
        if self.claim.attempt_number == 1:
            return frozenset()
        self._parts.merge_left([part.file_name for part in self._committed()])
        # Others by now, where some were merged.
        parts = self._committed()
        recovered = recover_shard(
            self._folder,
            self.claim.job_id,
            self.claim.shard_number,
            self.claim.attempt_id,
            [part.file_name for part in parts],
            self._retrial.committed(),
        )
        for part in parts:
            if part.file_name in recovered.missing:
                self.tools.ledger.leases.drop_part(self.claim, part.id)
        return recovered.rows

    def _committed(self) -> list[PartRecord]:
        return self.tools.ledger.parts(self.claim.job_id, self.claim.shard_number)

    def _collect(self, batch: RowBatch) -> None:
        """Until every row has its outcome: gather them and commit what is finished every `flush_seconds`."""
        while True:
            self._gather(batch)
            if self._deadline.has_passed:
                self._expire(batch)
            finished = batch.finished_rows() if self._cache_keys else {}
            table = batch.take_finished() if batch.has_finished else None
            self._parts.commit(table, batch.is_complete or batch.failure is not None or self._stop.is_set())
            self._keep(finished)
            if batch.is_complete:
                return
            if self._stop.is_set():
                raise Stopped
            if batch.failure is not None and not self._gives_up():
                raise EngineFailed(f"{ENGINE_FAILED}{batch.failure}")
            batch.refuse_failed(ENGINE_FAILED)

    def _keep(self, finished: Mapping[int, Mapping[str, Any]]) -> None:
        if finished:
            keys = self._cache_keys
            self.tools.answers.keep({keys[place]: columns for place, columns in finished.items() if place in keys})

    def _gather(self, batch: RowBatch) -> None:
        deadline = self._deadline.not_after(time.monotonic() + self.tools.flush_seconds)
        while not batch.is_answered:
            # Told to stop, take what the engine has answered by now.
            patience = 0.0 if self._stop.is_set() else max(0.0, deadline - time.monotonic())
            try:
                outcomes = self._outcomes.get(timeout=min(patience, _LOOK_SECONDS))
            except queue.Empty:
                if patience <= _LOOK_SECONDS:
                    return
                continue
            self._record(batch, outcomes)

    def _record(self, batch: RowBatch, outcomes: list[Outcome]) -> None:
        if further := batch.record(outcomes):
            self.tools.host.submit_rows(further, self._outcomes.put, batch.resume_logprobs)

    def _expire(self, batch: RowBatch) -> None:
        """Give up the rows that have no answer; what the engine has of them goes."""
        requests = batch.requests
        batch.give_up(NOT_ANSWERED)
        self.tools.host.abort(request.request_id for request in requests)

    def _gives_up(self) -> bool:
        errors = (attempt.error or "" for attempt in self.tools.ledger.attempts(self.claim.shard_id))
        return sum(error.startswith(ENGINE_FAILED) for error in errors) + 1 >= self.tools.max_failures


class AdapterMissing(StorageError):
    """The job's LoRA adapter cannot be read here by now; another worker may, or this one later."""


class EngineFailed(StorageError):
    """A step of the engine failed; the shard's open rows can be tried again."""
