"""A worker: one engine, the shards and the live requests it works on, and what keeps them alive."""

import gc
import logging
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self

from celery import Celery
from redis.exceptions import RedisError

from ..engine.config import EngineConfig
from ..engine.engine import Engine
from ..engine.hub import LocatedModel
from ..engine.model_config import ModelConfig
from ..engine.tokenizer import Tokenizer
from ..storage.errors import JobEnded, LeaseLost, LedgerUnavailable
from ..storage.ledger import Ledger
from ..storage.parts import remove_all_strays
from ..storage.records import Claim, JobRecord, JobState
from ..storage.result_cache import ResultCache
from .celery_app import (
    RESCUE_PRIORITY,
    Bells,
    create_app,
    live_queue,
    queue_is_empty,
    run_worker,
    send_shards,
    shard_queue,
)
from .embedded.valkey import RedisUrls, redis_urls
from .engine_host import EngineHost
from .errors import Stopped
from .live.cancels import CancelListener
from .live.claims import LiveClaims
from .live.runner import LiveRunner
from .open_ledger import open_ledger
from .periodic import Periodic
from .precision import Precision
from .presence import RENEW_SECONDS, WorkerId, WorkerPresence
from .settings import Settings
from .shards.answer_cache import AnswerCache
from .shards.attempt import AttemptTools, ShardAttempt
from .shards.checkpoints import TokenCheckpoints
from .shards.faults import HOPELESS_FAULTS, is_fault, repeated_fault, why_failed
from .shards.finishing import finish_job
from .shards.row_streams import LOOK_SECONDS, RowStreams
from .streams.publisher import StreamPublisher
from .streams.row_watch import RowWatch
from .tasks import register_tasks
from .webhooks import SEND_SECONDS, WebhookSender
from .weights import ModelWeights

logger = logging.getLogger(__name__)

_SWEEP_SECONDS = 1.0
# A queued shard whose message is older than this, while the queue is empty, has lost its message.
_LOST_MESSAGE_SECONDS = 5.0
_SWEEP_SHARDS = 64
_SWITCH_SECONDS = 0.001
# How many new objects there are when the garbage collector looks at them: a step of a large batch makes so many.
_YOUNG_OBJECTS = 20_000


@dataclass
class ShardRunner:
    """Runs the shards a worker is told of and knows which are in flight. Thread-safe.

    `weights`: what is noted with each job that it begins.
    """

    tools: AttemptTools
    queue: str
    owner: str
    lease_seconds: float
    weights: ModelWeights | None = None
    # The number of the shard that was taken last, by job.
    _last: dict[str, int] = field(default_factory=dict)
    _claiming: threading.Lock = field(default_factory=threading.Lock)
    _attempts: dict[int, ShardAttempt] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _draining: threading.Event = field(default_factory=threading.Event)

    def run(self, shard_id: str) -> None:
        """One attempt at the shard whose turn it is, which need not be the one that was rung for.

        Does nothing when none is queued; the ledger records how the attempt ended.
        """
        if self._draining.is_set():
            return
        claim = self._claim()
        if claim is None:
            logger.info("rung for shard %s, but none is there to be taken", shard_id)
            return
        try:
            state = self._attempt(claim)
            logger.info("shard %s is done, its job %s", shard_id, state)
            if state is JobState.COMPLETED:
                job = self.tools.ledger.job(claim.job_id)
                remove_all_strays(Path(job.output_dir), claim.attempt_id)
                finish_job(self.tools.ledger, job)
                self._last.pop(job.id, None)
        except LeaseLost as error:
            logger.warning("%s", error)
            self._release(claim, None)
        except Stopped:
            self._release(claim, None)
        # The job's boundary: whatever went wrong is written down with the shard, which is tried again.
        except Exception as error:
            logger.exception("attempt %d at shard %s failed", claim.attempt_number, claim.shard_id)
            self._release(claim, why_failed(error))

    def _claim(self) -> Claim | None:
        # One after the other, so that each goes on where the one before is.
        with self._claiming:
            claim = self.tools.ledger.claim_next(self.queue, self.owner, self.lease_seconds, self._last)
            if claim is not None:
                self._last[claim.job_id] = claim.shard_number
        return claim

    def _attempt(self, claim: Claim) -> JobState:
        job = self.tools.ledger.job(claim.job_id)
        if self.weights is not None:
            self._note_weights(job, self.weights)
        attempt = ShardAttempt(self.tools, claim, job)
        with self._lock:
            self._attempts[claim.attempt_id] = attempt
        try:
            if self._draining.is_set():
                attempt.stop()
            return attempt.run()
        finally:
            with self._lock:
                del self._attempts[claim.attempt_id]

    def _note_weights(self, job: JobRecord, weights: ModelWeights) -> None:
        try:
            if job.weights is None:
                self.tools.ledger.note_weights(job.id, weights.identity())
            elif job.weights != weights.identity():
                logger.warning("job %s was begun with other weights of %s than are here", job.id, job.model)
        except OSError as error:
            logger.warning("the weights of job %s are not noted: %s", job.id, error)

    def _release(self, claim: Claim, error: str | None) -> None:
        try:
            self.tools.ledger.release(claim, error)
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

    def renew_leases(self) -> None:
        """Keep what is in flight; stop the attempts whose lease is gone. Raises `LedgerUnavailable`."""
        with self._lock:
            attempts = dict(self._attempts)
        held = self.tools.ledger.renew(self.owner, list(attempts), self.lease_seconds)
        for attempt_id in attempts.keys() - held:
            attempts[attempt_id].stop()

    def drain(self) -> None:
        """Take nothing more and make what is in flight hand back its open rows."""
        self._draining.set()
        with self._lock:
            for attempt in self._attempts.values():
                attempt.stop()


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
            lost = self.ledger.unclaimed(self.queue, _LOST_MESSAGE_SECONDS, _SWEEP_SHARDS)
            send_shards(self.app, self.queue, lost, RESCUE_PRIORITY)

    def _due_retries(self) -> list[str]:
        began = time.monotonic()
        try:
            due = self.ledger.due_retries(self.queue)
        except LedgerUnavailable:
            self._none_dead_before = time.monotonic() + self.lease_seconds
            raise
        # A locked SQLite makes writers wait. Leases are renewed every third of their time.
        if time.monotonic() - began > self.lease_seconds / 3:
            self._none_dead_before = time.monotonic() + self.lease_seconds
        return due

    def _put_back(self) -> None:
        expired = self.ledger.requeue_expired(self.queue)
        if expired:
            logger.warning("leases ran out, putting back: %s", ", ".join(expired))
            send_shards(self.app, self.queue, expired, RESCUE_PRIORITY)


@dataclass(frozen=True)
class WorkerOptions:
    """Which model a worker serves, and with what engine. `concurrency`: shards in flight at a time."""

    model: LocatedModel
    engine: EngineConfig
    concurrency: int

    @property
    def queue(self) -> str:
        return shard_queue(self.model.name, *self._precision)

    @property
    def live_queue(self) -> str:
        return live_queue(self.model.name, *self._precision)

    @property
    def _precision(self) -> Precision:
        return Precision(self.engine.dtype, self.engine.quantization, self.engine.kv_cache_dtype)


def serve(
    settings: Settings,
    options: WorkerOptions,
    load: Callable[[Path, EngineConfig], Engine] = Engine.from_pretrained,
) -> int:
    """Work until SIGTERM or SIGINT, in the main thread; returns the exit status. `load` makes the engine.

    Raises `ModelError`, `ConfigError`, `LedgerError` or `EmbeddedValkeyError` when it cannot start. Ends in the
    order: take no more shards, hand back or finish those in flight, stop the engine, leave.
    """
    with ExitStack() as stack:
        base = _Base.opened(settings, options, load, stack)
        row_streams, checkpoints = base.row_streams(), base.checkpoints()
        runner = base.shard_runner(row_streams, checkpoints)
        register_tasks(base.app, runner.run)
        sweeper = Sweeper(base.ledger, base.app, options.queue, settings.lease_seconds)
        live = base.live_runner()
        for name, seconds, action in (
            ("lease renewal", settings.lease_seconds / 3, runner.renew_leases),
            ("sweeper", _SWEEP_SECONDS, sweeper.sweep),
            ("live lease renewal", settings.lease_seconds / 3, live.renew_leases),
            ("live sweeper", _SWEEP_SECONDS, live.sweep),
            ("row streams", LOOK_SECONDS, row_streams.look),
            ("checkpoints", settings.flush_seconds, checkpoints.save),
            ("webhooks", SEND_SECONDS, WebhookSender.of(base.ledger, settings).send_due),
            ("presence", RENEW_SECONDS, _announcer(base.urls, options.queue, base.worker_id, base.host, stack)),
        ):
            stack.enter_context(Periodic(name, seconds, action))
        name, context = options.model.name, base.host.max_model_len
        logger.info("serving %s, up to %d tokens a sequence, as %s", name, context, base.worker_id)
        # After what renews its leases: leaving it takes a while.
        stack.enter_context(live)
        stack.enter_context(CancelListener(base.urls.redis, live.cancel))
        _tune_interpreter()
        bells = Bells(options.live_queue, live.ring)
        status = run_worker(base.app, [options.queue], options.concurrency, runner.drain, bells)
    logger.info("stopped")
    return status


@dataclass(frozen=True)
class _Base:
    """What everything in a worker stands on. What its methods make is open until `stack` is left."""

    settings: Settings
    options: WorkerOptions
    stack: ExitStack
    ledger: Ledger
    urls: RedisUrls
    weights: ModelWeights
    tokenizer: Tokenizer
    host: EngineHost
    publisher: StreamPublisher
    app: Celery
    worker_id: WorkerId

    @classmethod
    def opened(
        cls,
        settings: Settings,
        options: WorkerOptions,
        load: Callable[[Path, EngineConfig], Engine],
        stack: ExitStack,
    ) -> Self:
        # Before the tokenizer: it could not tell a folder that is no model from a model without one.
        ModelConfig.from_pretrained(options.model.folder)
        tokenizer = Tokenizer.from_pretrained(options.model.folder)
        ledger = stack.enter_context(open_ledger(settings))
        urls = stack.enter_context(redis_urls(settings))
        weights = ModelWeights(options.model)
        host = stack.enter_context(EngineHost(load(options.model.folder, options.engine)))
        publisher = stack.enter_context(StreamPublisher(urls.redis, settings.stream_ttl_seconds))
        app, worker_id = create_app(urls.broker), WorkerId.own()
        return cls(settings, options, stack, ledger, urls, weights, tokenizer, host, publisher, app, worker_id)

    def row_streams(self) -> RowStreams:
        watch = self.stack.enter_context(RowWatch(self.urls.redis))
        return self.stack.enter_context(RowStreams(self.host, self.tokenizer, self.publisher, watch))

    def checkpoints(self) -> TokenCheckpoints:
        ttl_seconds = self.settings.stream_ttl_seconds
        return self.stack.enter_context(TokenCheckpoints(self.urls.redis, self.host, ttl_seconds))

    def shard_runner(self, row_streams: RowStreams, checkpoints: TokenCheckpoints) -> ShardRunner:
        settings = self.settings
        results = self.stack.enter_context(ResultCache(self.urls.redis, settings.result_cache_ttl_seconds))
        tools = AttemptTools(
            self.ledger,
            self.host,
            self.tokenizer,
            settings.flush_seconds,
            row_streams=row_streams,
            checkpoints=checkpoints,
            answers=AnswerCache(results, self.weights),
        )
        return ShardRunner(tools, self.options.queue, str(self.worker_id), settings.lease_seconds, self.weights)

    def live_runner(self) -> LiveRunner:
        """Not entered yet."""
        settings, options = self.settings, self.options
        lease_seconds, ttl_seconds = settings.lease_seconds, settings.stream_ttl_seconds
        claims = self.stack.enter_context(
            LiveClaims(self.urls.redis, options.live_queue, str(self.worker_id), lease_seconds, ttl_seconds)
        )
        slots = options.engine.max_num_seqs
        return LiveRunner(self.host, self.tokenizer, self.publisher, claims, self.app, num_slots=slots)


def _tune_interpreter() -> None:
    # A full collection would walk the libraries' hundreds of thousands of objects again and again.
    gc.collect()
    gc.freeze()
    # Bells, claims and flushes are many short turns beside the engine's thread: each would wait 5 ms for its own.
    sys.setswitchinterval(_SWITCH_SECONDS)
    gc.set_threshold(_YOUNG_OBJECTS)


def _announcer(
    urls: RedisUrls, queue: str, worker_id: WorkerId, host: EngineHost, stack: ExitStack
) -> Callable[[], None]:
    """Says that this worker is alive and how its engine does, and brings the embedded server back should it be gone."""
    presence = stack.enter_context(WorkerPresence(urls.redis))
    stack.callback(presence.withdraw, queue, worker_id)

    def announce() -> None:
        urls.ensure()
        presence.announce(queue, worker_id, asdict(host.stats))

    try:
        announce()
    except RedisError as error:
        # It was restarted this moment: the next announcement is due soon.
        logger.warning("presence: %s; trying again", error)
    return announce
