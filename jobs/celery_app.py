"""The Celery side: one application, one queue a model, messages that carry a shard's id and nothing else.

Messages are doorbells: taken off Redis when they arrive, never acknowledged. A lost one is healed by the
sweeper, a doubled one by the ledger's lease, and no visibility timeout has to outlast a shard.
"""

import hashlib
import logging
import signal
import socket
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from celery import Celery, bootsteps, signals
from celery.apps.worker import Worker
from celery.concurrency.thread import ApplyResult, TaskPool
from celery.exceptions import SecurityWarning
from celery.worker import state as worker_state
from kombu.asynchronous.hub import Hub
from kombu.entity import Exchange, Queue
from kombu.exceptions import BatchPublishError, ChannelError, OperationalError
from kombu.message import Message
from kombu.messaging import Consumer

from .celery_consumer import PatientConsumer
from .precision import Precision

logger = logging.getLogger(__name__)

RUN_SHARD = "headrace.run_shard"
# On Redis 0 is the highest priority: what the sweeper puts back goes ahead of what waits.
RESCUE_PRIORITY = 0
BULK_PRIORITY = 6
_BATCH_MESSAGES = 500
# How long Redis may take to answer. Nothing is read of a BRPOP before something has come: that may take only the rest.
_REPLY_SECONDS = 10.0
# A message costs a worker some 0.3 ms before it is heard. In a burst one names several requests; not all of them, so
# that several workers share them.
_REQUESTS_PER_BELL = 16


def shard_queue(model: str, dtype: str, quantization: str | None = None, kv_cache_dtype: str = "auto") -> str:
    """Name the queue that workers with this model in this precision listen to."""
    return f"headrace.bulk.{_model_key(model, Precision(dtype, quantization, kv_cache_dtype))}"


def live_queue(model: str, dtype: str, quantization: str | None = None, kv_cache_dtype: str = "auto") -> str:
    """Name the queue of the same workers for interactive requests."""
    return f"headrace.live.{_model_key(model, Precision(dtype, quantization, kv_cache_dtype))}"


def _model_key(model: str, precision: Precision) -> str:
    kv_cache = [] if precision.kv_cache_dtype == "auto" else [f"kv_cache:{precision.kv_cache_dtype}"]
    named = [model, precision.dtype, *([precision.quantization] if precision.quantization else []), *kv_cache]
    return hashlib.sha256("|".join(named).encode()).hexdigest()[:12]


def create_app(broker_url: str) -> Celery:
    """Make the application for producers and workers alike; connects to nothing yet.

    `broker_url` is as Celery writes it (`redis+socket:///path` for a UNIX socket, see `RedisUrls.broker`).
    """
    app = Celery("headrace", broker=broker_url, set_as_current=False)
    app.conf.update(
        task_acks_late=False,
        task_ignore_result=True,
        task_serializer="json",
        accept_content=["json"],
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        # Else any error answer to a BRPOP, such as a failover's, would end the worker.
        broker_channel_error_retry=True,
        broker_transport_options={
            "priority_steps": [RESCUE_PRIORITY, 3, BULK_PRIORITY, 9],
            # With acknowledgements in Redis, one that fails while Redis is away is never made good: the
            # message holds its place in the prefetch window, and when all do, the worker takes no more.
            "ack_emulation": False,
            # Seconds a BRPOP waits in Redis, and so what leaving may take.
            "polling_interval": 0.2,
            # Else half an answer, on a connection that stays open, would make a worker deaf for good.
            "socket_timeout": _REPLY_SECONDS,
        },
        worker_prefetch_multiplier=1,
        # A message waits in the queue, where any worker can take it, until there is a thread for it.
        worker_disable_prefetch=True,
        worker_enable_remote_control=False,
    )
    return app


def send_shards(app: Celery, queue: str, shard_ids: Sequence[str], priority: int = BULK_PRIORITY) -> None:
    """Publish one message a shard, pipelined over one connection.

    Raises kombu's OperationalError when Redis cannot be reached; some messages may be out by then.
    """
    target = _queue(queue)
    try:
        with app.producer_pool.acquire(block=True) as producer, producer.batch(_BATCH_MESSAGES):
            for shard_id in shard_ids:
                app.send_task(RUN_SHARD, args=[shard_id], queue=target, priority=priority, producer=producer)
    except BatchPublishError as error:
        raise OperationalError(str(error.__cause__)) from error


def send_request(app: Celery, queue: str, *request_ids: str) -> None:
    """Ring for interactive requests. Raises kombu's OperationalError when Redis cannot be reached."""
    with app.producer_pool.acquire(block=True) as producer:
        for start in range(0, len(request_ids), _REQUESTS_PER_BELL):
            some = request_ids[start : start + _REQUESTS_PER_BELL]
            # Not through `send_task`: nobody would read a task's headers.
            producer.publish(some, exchange="", routing_key=queue, serializer="json", priority=RESCUE_PRIORITY)


@dataclass(frozen=True)
class Bells:
    """A queue whose messages name interactive requests, and who is told of each: in the event loop, so at once."""

    queue: str
    on_ring: Callable[[str], None]


def run_worker(
    app: Celery,
    queues: Sequence[str],
    concurrency: int,
    on_shutdown: Callable[[], None],
    bells: Bells | None = None,
) -> int:
    """Consume the queues in this (main) thread until SIGTERM or SIGINT; returns the exit status.

    Tasks run in `concurrency` threads. When told to stop, takes no more messages, calls `on_shutdown` once in
    this thread (it is to make running tasks return soon) and waits for them. A second SIGINT ends the process
    at once. Redis going away, even for long, ends nothing, nor does any error that it answers.
    """
    signals.setup_logging.connect(_leave_logging_alone)
    # Its advice against root is about pickled messages, which are refused anyway.
    warnings.filterwarnings("ignore", category=SecurityWarning)
    app.conf.task_queues = [_queue(name) for name in queues]
    if bells is not None:
        app.steps["consumer"].add(_bell_step(bells))
    with _signal_arrivals() as arrivals:
        worker = _Worker(
            app=app,
            pool_cls=_WakingThreadPool,
            consumer_cls=PatientConsumer,
            concurrency=concurrency,
            arrivals=arrivals,
            on_shutdown=on_shutdown,
            quiet=True,
            without_gossip=True,
            without_mingle=True,
            without_heartbeat=True,
        )
        worker.start()
    return int(worker.exitcode or 0)


def _bell_step(bells: Bells) -> type[bootsteps.ConsumerStep]:
    """Listens to a queue beside the tasks', on a channel of its own.

    A channel asks Redis for the next message only while its worker has room, and what it has asked for it cannot take
    back. So one channel for both queues would have to leave the tasks' out while every thread is busy, and would then
    notice a free thread late.
    """

    class BellStep(bootsteps.ConsumerStep):
        def get_consumers(self, channel: Any) -> list[Consumer]:
            return [Consumer(channel, [_queue(bells.queue)], no_ack=True, callbacks=[self.hear], accept=["json"])]

        def hear(self, body: Any, message: Message) -> None:
            # A text alone is what producers of an older version send.
            request_ids = [body] if isinstance(body, str) else body
            if isinstance(request_ids, list) and all(isinstance(each, str) for each in request_ids):
                for request_id in request_ids:
                    bells.on_ring(request_id)
            else:
                logger.warning("%s: no requests' ids: %.100r", bells.queue, body)

    return BellStep


def queue_is_empty(app: Celery, queue: str) -> bool:
    """Whether no message waits. Raises kombu's OperationalError or redis' errors when Redis cannot be reached."""
    with app.connection_for_read() as connection, connection.channel() as channel:
        try:
            return bool(channel.queue_declare(queue, passive=True).message_count == 0)
        except ChannelError:
            # Redis has no empty lists: a drained queue does not exist.
            return True


def _queue(name: str) -> Queue:
    # The nameless exchange delivers to the queue named by the routing key, without the binding table that a
    # Redis restarted empty would lack.
    return Queue(name, exchange=Exchange(""), routing_key=name)


def _leave_logging_alone(**_: Any) -> None:
    """Keep Celery from configuring the root logger: having a receiver of `setup_logging` is enough."""


class _WakingThreadPool(TaskPool):
    """Celery's thread pool, telling the event loop at once that a thread is free.

    The loop itself would notice only when its poll times out, after up to a second of an idle thread.
    """

    def register_with_event_loop(self, loop: Hub) -> None:
        self._loop = loop

    def on_apply(self, *args: Any, **kwargs: Any) -> ApplyResult:
        result = super().on_apply(*args, **kwargs)
        result.f.add_done_callback(lambda _: self._loop.call_soon(_nothing))
        return result


def _nothing() -> None:
    """Give the event loop a reason to go round."""


class _Worker(Worker):
    def __init__(self, arrivals: socket.socket, on_shutdown: Callable[[], None], **options: Any) -> None:
        self._arrivals = arrivals
        self._on_shutdown = on_shutdown
        super().__init__(**options)

    def install_platform_tweaks(self, worker: Worker) -> None:
        """Replace Celery's signal handlers: they print to stdout, and SIGHUP would start argv anew."""
        signal.signal(signal.SIGTERM, _stop)
        signal.signal(signal.SIGINT, _stop)

    def register_with_event_loop(self, hub: Hub) -> None:
        super().register_with_event_loop(hub)
        hub.add_reader(self._arrivals, self._arrivals.recv, 64)

    def on_close(self) -> None:
        self._on_shutdown()
        super().on_close()


def _stop(signum: int, frame: FrameType | None) -> None:
    worker_state.should_stop = 0
    if signum == signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def _signal_arrivals() -> Iterator[socket.socket]:
    """A socket that becomes readable when a signal arrives: Python resumes an interrupted poll by itself."""
    arrivals, notify = socket.socketpair()
    with arrivals, notify:
        arrivals.setblocking(False)
        notify.setblocking(False)
        former = signal.set_wakeup_fd(notify.fileno(), warn_on_full_buffer=False)
        try:
            yield arrivals
        finally:
            signal.set_wakeup_fd(former)
