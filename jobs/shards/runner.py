"""The shards that a worker works on: each taken under a lease, tried once, and handed back if that fails."""

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from ...storage.errors import JobEnded, LeaseLost, LedgerUnavailable
from ...storage.ledger.records import Claim, JobRecord, JobState
from ..errors import LaterVersion, Stopped
from ..rare_warnings import RareWarnings
from ..spec.lora import LoraModule
from .adapters import AdapterNotHeld, FittingAdapters
from .attempt import AttemptTools, ShardAttempt
from .faults import HOPELESS_FAULTS, is_fault, repeated_fault, why_failed
from .finishing import finish_job
from .weights import ModelWeights

logger = logging.getLogger(__name__)

_PASS_ON_SECONDS = 0.5
_LEDGER_PAUSE_SECONDS = 1.0
# Of how many jobs it is known where this worker is. Others end most of those that it has begun.
_MAX_LAST = 1000


@dataclass
class ShardRunner:
    """Runs the shards a worker is told of and knows which are in flight. Thread-safe.

    `weights`: what is noted with each job that it begins. `adapters`: which it can hold.
    `ring`: tells the queue's workers of shards. `left_alone`: jobs that it cannot answer and others may.
    """

    tools: AttemptTools
    queue: str
    owner: str
    lease_seconds: float
    weights: ModelWeights
    adapters: FittingAdapters
    ring: Callable[[Sequence[str]], None]
    left_alone: set[str] = field(default_factory=set)
    # The number of the shard that was taken last, by job, the one taken up latest at the end.
    _last: dict[str, int] = field(default_factory=dict)
    _claiming: threading.Lock = field(default_factory=threading.Lock)
    # By their claims' names.
    _attempts: dict[str, ShardAttempt] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _draining: threading.Event = field(default_factory=threading.Event)
    _warnings: RareWarnings = field(default_factory=lambda: RareWarnings(logger))

    def run(self, shard_id: str) -> None:
        """One attempt at the shard whose turn it is, which need not be the one that was rung for.

        Does nothing when none is queued; the ledger records how the attempt ended.
        """
        if self._draining.is_set():
            return
        try:
            claim = self._claim()
            if claim is None:
                self._pass_on(shard_id)
        except LedgerUnavailable as error:
            self._wait_for_ledger(error)
            return
        if claim is None:
            return
        try:
            state = self._attempt(claim)
            logger.info("shard %s is done, its job %s", claim.shard_id, state)
            if state is JobState.COMPLETED:
                job = self.tools.ledger.job(claim.job_id)
                finish_job(self.tools.ledger, job)
                self._last.pop(job.id, None)
        except LeaseLost as error:
            logger.warning("%s", error)
            self._release(claim, None)
        except Stopped:
            self._release(claim, None)
        except (AdapterNotHeld, LaterVersion) as error:
            logger.warning("job %s is left to other workers: %s", claim.job_id, error)
            self.left_alone.add(claim.job_id)
            self._release(claim, str(error))
            self._forget_left_alone()
        # The job's boundary: whatever went wrong is written down with the shard, which is tried again.
        except Exception as error:
            why = why_failed(error)
            if is_fault(why):
                logger.exception("attempt %d at shard %s failed", claim.attempt_number, claim.shard_id)
            else:
                logger.error("attempt %d at shard %s failed: %s", claim.attempt_number, claim.shard_id, why)
            self._release(claim, why)

    def _claim(self) -> Claim | None:
        # One after the other, so that each goes on where the one before is.
        with self._claiming:
            leases = self.tools.ledger.leases
            claim = leases.claim_next(self.queue, self.owner, self.lease_seconds, self._last, self.left_alone)
            if claim is not None:
                self._note_last(claim)
        return claim

    def _wait_for_ledger(self, error: LedgerUnavailable) -> None:
        """A sweeper rings again. Not at once: without a wait all messages of the queue would be taken in vain."""
        self._warnings.warn(f"no shard can be taken: {error}")
        self._draining.wait(_LEDGER_PAUSE_SECONDS)

    def _note_last(self, claim: Claim) -> None:
        self._last.pop(claim.job_id, None)
        self._last[claim.job_id] = claim.shard_number
        if len(self._last) > _MAX_LAST:
            self._last.pop(next(iter(self._last)), None)

    def _pass_on(self, shard_id: str) -> None:
        """Ring again where another worker can take what this one leaves alone; not at once, as it may be ours again."""
        job_id = shard_id.rpartition("/")[0]
        if job_id not in self.left_alone:
            logger.info("rung for shard %s, but none is there to be taken", shard_id)
            return
        if not self._draining.wait(_PASS_ON_SECONDS) and not self.tools.ledger.leases.has_queued(job_id):
            self.left_alone.discard(job_id)
            return
        self.ring([shard_id])

    def _forget_left_alone(self) -> None:
        """Jobs of which nothing is left to be taken: what is left alone is looked at in each claim."""
        with suppress(LedgerUnavailable):
            for job_id in list(self.left_alone):
                if not self.tools.ledger.leases.has_queued(job_id):
                    self.left_alone.discard(job_id)

    def _attempt(self, claim: Claim) -> JobState:
        job = self.tools.ledger.job(claim.job_id)
        attempt = ShardAttempt(self.tools, claim, job)
        lora = attempt.spec.lora
        self.adapters.expect(lora)
        # From here on its lease is renewed: weights may still be read for longer than it lasts.
        with self._lock:
            self._attempts[claim.name] = attempt
        try:
            self._note_weights(job, lora)
            if self._draining.is_set():
                attempt.stop()
            return attempt.run()
        finally:
            with self._lock:
                del self._attempts[claim.name]

    def _note_weights(self, job: JobRecord, lora: LoraModule | None) -> None:
        try:
            if (here := self.weights.identity(lora)) in job.all_weights:
                return
            self.tools.ledger.note_weights(job.id, here)
            if job.weights is not None:
                logger.warning("job %s was begun with other weights of %s than are here", job.id, job.model)
        except OSError as error:
            logger.warning("the weights of job %s are not noted: %s", job.id, error)

    def _release(self, claim: Claim, error: str | None) -> None:
        try:
            self.tools.ledger.leases.release(claim, error)
            if is_fault(error):
                self._pause_if_hopeless(claim)
        except LedgerUnavailable as unavailable:
            logger.warning("shard %s goes back when its lease ends: %s", claim.shard_id, unavailable)
        except JobEnded as ended:
            logger.info("%s", ended)

    def _pause_if_hopeless(self, claim: Claim) -> None:
        """Let the job wait for somebody to mend what is wrong and resume it, with the fault as its error."""
        if claim.attempt_number < HOPELESS_FAULTS:
            return
        ledger = self.tools.ledger
        attempts, parts = ledger.attempts(claim.shard_id), ledger.parts(claim.job_id, claim.shard_number)
        if (fault := repeated_fault(attempts, parts, HOPELESS_FAULTS)) is not None:
            ledger.pause_job(claim.job_id)
            logger.error("job %s is paused, shard %s fails again and again: %s", claim.job_id, claim.shard_id, fault)

    @property
    def attempts(self) -> list[ShardAttempt]:
        """Those in flight."""
        with self._lock:
            return list(self._attempts.values())

    def renew_leases(self) -> None:
        """Keep what is in flight; stop the attempts whose lease is gone. Raises `LedgerUnavailable`."""
        attempts = self.attempts
        began = time.monotonic()
        attempt_ids = [attempt.claim.attempt_id for attempt in attempts]
        held = self.tools.ledger.leases.renew(self.owner, attempt_ids, self.lease_seconds)
        self._expect_time(time.monotonic() - began)
        for attempt in attempts:
            if attempt.claim.attempt_id not in held:
                attempt.stop()

    def _expect_time(self, seconds: float) -> None:
        """Renewals come every third of a lease: one that takes as long leaves none to spare."""
        if seconds > self.lease_seconds / 3:
            logger.warning(
                "the ledger took %.1f s to renew leases of %g s, after which others take the shards: if it does again, "
                "raise HEADRACE_LEASE_SECONDS, for all workers alike, to %d or more",
                seconds,
                self.lease_seconds,
                math.ceil(6 * seconds),
            )

    def drain(self) -> None:
        """Take nothing more and make what is in flight hand back its open rows."""
        self._draining.set()
        with self._lock:
            for attempt in self._attempts.values():
                attempt.stop()
