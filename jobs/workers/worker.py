"""A worker: one engine, the shards and the live requests it works on, and what keeps them alive."""

import gc
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Self

from celery import Celery
from redis.exceptions import RedisError

from ...engine.checkpoints.hub import LocatedModel
from ...engine.checkpoints.model_config import ModelConfig
from ...engine.config import EngineConfig
from ...engine.engine import Engine
from ...engine.text.tokenizer import Tokenizer
from ...storage.ledger.ledger import Ledger
from ...storage.result_cache import ResultCache
from ..broker.celery_app import RUN_SHARD, create_app, live_queue, ring_for_shards, shard_queue
from ..broker.redis_access import RedisServer, check_access, redis_server
from ..hosting.engine_host import EngineHost
from ..live.cancel_listener import CancelListener
from ..live.claims import LiveClaims
from ..live.runner import LiveRunner
from ..open_ledger import open_ledger
from ..outside.webhooks import SEND_SECONDS, WebhookSender
from ..periodic import Periodic
from ..settings import Settings
from ..shards.adapters import FittingAdapters
from ..shards.answer_cache import AnswerCache
from ..shards.attempt import AttemptTools
from ..shards.checkpoints import TokenCheckpoints
from ..shards.finishing import finish_all_left
from ..shards.receipts import Computation, Receipts
from ..shards.row_streams import LOOK_SECONDS, RowStreams
from ..shards.runner import ShardRunner
from ..shards.sweeper import SWEEP_SECONDS, Sweeper
from ..shards.weights import ModelWeights
from ..spec.precision import Precision
from ..streams.publisher import StreamPublisher
from ..streams.row_watch import RowWatch
from .celery_worker import Bells, run_worker
from .leaving import Leaving
from .presence import RENEW_SECONDS, WorkerId, WorkerPresence
from .watchdog import DEFAULT_SECONDS, ENGINE, EngineAtWork, Watchdog, works_of

logger = logging.getLogger(__name__)

_SWITCH_SECONDS = 0.001
# How many new objects there are when the garbage collector looks at them: a step of a large batch makes so many.
_YOUNG_OBJECTS = 100_000


@dataclass(frozen=True)
class WorkerOptions:
    """Which model a worker serves, and with what engine.

    `concurrency`: shards in flight at a time. `watchdog_seconds`: how long a step may take; 0: for ever.
    """

    model: LocatedModel
    engine: EngineConfig
    concurrency: int
    watchdog_seconds: float = DEFAULT_SECONDS

    @property
    def queue(self) -> str:
        return shard_queue(self.model.name, self._precision)

    @property
    def live_queue(self) -> str:
        return live_queue(self.model.name, self._precision)

    @property
    def _precision(self) -> Precision:
        return Precision(self.engine.dtype, self.engine.quantization, self.engine.kv_cache_dtype)


def serve(
    settings: Settings,
    options: WorkerOptions,
    load: Callable[[Path, EngineConfig], Engine] = Engine.from_pretrained,
) -> int:
    """Work until SIGTERM or SIGINT, in the main thread; returns the exit status. `load` makes the engine.

    Raises `ModelError`, `ConfigError`, `LedgerError`, `EmbeddedValkeyError`, or `SettingsError` for a Redis that
    refuses us, when it cannot start. Ends in the order: take no more shards, hand back or finish those in flight, stop
    the engine, leave.
    """
    with Leaving() as leaving, ExitStack() as stack:
        base = _Base.opened(settings, options, load, stack)
        row_streams, checkpoints = base.row_streams(), base.checkpoints()
        runner, live = base.shard_runner(row_streams, checkpoints), base.live_runner()
        base.app.task(name=RUN_SHARD)(runner.run)
        base.watchdog.watch(partial(works_of, base.host, runner))
        for chore in base.chores(runner, live, row_streams, checkpoints):
            stack.enter_context(chore)
        name, context = options.model.name, base.host.max_model_len
        logger.info("serving %s, up to %d tokens a sequence, as %s", name, context, base.worker_id)
        # After what renews its leases: leaving it takes a while.
        stack.enter_context(live)
        stack.enter_context(CancelListener(base.redis.url, live.cancel))
        _tune_interpreter()
        bells = Bells(options.live_queue, live.ring)

        def drain() -> None:
            runner.drain()
            leaving.begin(base.redis.url, lambda: bool(runner.attempts))

        status = run_worker(base.app, [options.queue], options.concurrency, drain, bells)
    logger.info("stopped")
    return status


def _tune_interpreter() -> None:
    # A full collection would walk the libraries' hundreds of thousands of objects again and again.
    gc.collect()
    gc.freeze()
    # Bells, claims and flushes are many short turns beside the engine's thread: each would wait 5 ms for its own.
    sys.setswitchinterval(_SWITCH_SECONDS)
    gc.set_threshold(_YOUNG_OBJECTS)


def _end_process(reason: str) -> None:
    """Whatever is under way is another attempt's: threads that wait for what never comes are not waited for."""
    print(f"headrace worker: {reason}", file=sys.stderr, flush=True)
    os._exit(1)


@contextmanager
def _said_to_load(redis_url: str, queue: str, worker_id: WorkerId) -> Iterator[None]:
    """Who asks meanwhile is told that the model is being loaded."""
    with WorkerPresence(redis_url) as presence:
        announce = partial(presence.announce_loading, queue, worker_id)
        # The first at once; without Redis nobody asks.
        with suppress(RedisError):
            announce()
        with Periodic("loading", RENEW_SECONDS, announce):
            yield


@dataclass(frozen=True)
class _Base:
    """What everything in a worker stands on. What its methods make is open until `stack` is left."""

    settings: Settings
    options: WorkerOptions
    model: ModelConfig
    stack: ExitStack
    ledger: Ledger
    redis: RedisServer
    weights: ModelWeights
    tokenizer: Tokenizer
    host: EngineHost
    publisher: StreamPublisher
    app: Celery
    worker_id: WorkerId
    watchdog: Watchdog

    @classmethod
    def opened(
        cls,
        settings: Settings,
        options: WorkerOptions,
        load: Callable[[Path, EngineConfig], Engine],
        stack: ExitStack,
    ) -> Self:
        watchdog = stack.enter_context(Watchdog(options.watchdog_seconds))
        # Before the tokenizer: it could not tell a folder that is no model from a model without one.
        model = ModelConfig.from_pretrained(options.model.folder)
        tokenizer = Tokenizer.from_pretrained(options.model.folder)
        ledger = stack.enter_context(open_ledger(settings))
        if settings.redis_url is not None:
            check_access(settings.redis_url)
        redis = stack.enter_context(redis_server(settings))
        weights = ModelWeights(options.model)
        worker_id = WorkerId.own(ledger.identity)
        with _said_to_load(redis.url, options.queue, worker_id):
            engine = load(options.model.folder, options.engine)
        stack.callback(engine.close)
        engine.call_when_dead(_end_process)
        host = stack.enter_context(EngineHost(engine))
        watchdog.watch(lambda: {ENGINE: EngineAtWork(host)})
        publisher = stack.enter_context(StreamPublisher(redis.url, settings.stream_ttl_seconds))
        app = create_app(redis.url)
        return cls(
            *(settings, options, model, stack, ledger, redis, weights, tokenizer, host, publisher, app, worker_id),
            watchdog,
        )

    def row_streams(self) -> RowStreams:
        watch = self.stack.enter_context(RowWatch(self.redis.url))
        return self.stack.enter_context(RowStreams(self.host, self.tokenizer, self.publisher, watch))

    def checkpoints(self) -> TokenCheckpoints:
        ttl_seconds = self.settings.stream_ttl_seconds
        return self.stack.enter_context(TokenCheckpoints(self.redis.url, self.host, ttl_seconds))

    def shard_runner(self, row_streams: RowStreams, checkpoints: TokenCheckpoints) -> ShardRunner:
        settings = self.settings
        results = self.stack.enter_context(ResultCache(self.redis.url, settings.result_cache_ttl_seconds))
        tools = AttemptTools(
            self.ledger,
            self.host,
            self.tokenizer,
            row_streams,
            checkpoints,
            AnswerCache(results, self.weights),
            Receipts(self.weights, Computation.of(self.options.engine, self.model)),
            settings.flush_seconds,
        )
        return ShardRunner(
            tools,
            self.options.queue,
            str(self.worker_id),
            settings.lease_seconds,
            self.weights,
            FittingAdapters(self.options.engine),
            partial(ring_for_shards, self.app, self.options.queue),
        )

    def live_runner(self) -> LiveRunner:
        """Not entered yet."""
        settings, options = self.settings, self.options
        lease_seconds, ttl_seconds = settings.lease_seconds, settings.stream_ttl_seconds
        claims = self.stack.enter_context(
            LiveClaims(self.redis.url, self.app, options.live_queue, str(self.worker_id), lease_seconds, ttl_seconds)
        )
        slots = options.engine.max_num_seqs
        return LiveRunner(self.host, self.tokenizer, self.publisher, claims, num_slots=slots)

    def chores(
        self, shards: ShardRunner, live: LiveRunner, row_streams: RowStreams, checkpoints: TokenCheckpoints
    ) -> list[Periodic]:
        """What is done every so often, not begun yet; the worker is announced before this returns."""
        settings = self.settings
        renewal_seconds = settings.lease_seconds / 3
        sweeper = Sweeper(self.ledger, self.app, self.options.queue, settings.lease_seconds)
        webhooks = WebhookSender.of(self.ledger, settings)
        return [
            Periodic("lease renewal", renewal_seconds, shards.renew_leases),
            Periodic("sweeper", SWEEP_SECONDS, sweeper.sweep),
            Periodic("tidying", SWEEP_SECONDS, partial(finish_all_left, self.ledger, self.options.queue)),
            Periodic("live lease renewal", renewal_seconds, live.renew_leases),
            Periodic("live sweeper", SWEEP_SECONDS, live.sweep),
            Periodic("row streams", LOOK_SECONDS, row_streams.look),
            Periodic("checkpoints", settings.flush_seconds, checkpoints.save),
            Periodic("webhooks", SEND_SECONDS, webhooks.send_due, webhooks.stop),
            Periodic("presence", RENEW_SECONDS, self._announcer()),
        ]

    def _announcer(self) -> Callable[[], None]:
        """Says that this worker is alive and how its engine does, and brings the embedded server back should it go."""
        presence = self.stack.enter_context(WorkerPresence(self.redis.url))
        queue, worker_id = self.options.queue, self.worker_id
        self.stack.callback(presence.withdraw, queue, worker_id)

        def announce() -> None:
            self.redis.ensure()
            stats = asdict(self.host.stats) | {"stalled_seconds": self.watchdog.stalled_seconds}
            presence.announce(queue, worker_id, stats, self.options.model.name)

        try:
            announce()
        except RedisError as error:
            # It was restarted this moment: the next announcement is due soon.
            logger.warning("presence: %s; trying again", error)
        return announce
