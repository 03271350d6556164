"""The Celery side: one application, one queue a model, messages that carry a shard's id and nothing else.

Messages are doorbells: taken off Redis when they arrive, never acknowledged. A lost one is healed by the
sweeper, a doubled one by the ledger's lease, and no visibility timeout has to outlast a shard.
"""

import hashlib
import logging
from collections.abc import Sequence
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from celery import Celery
from kombu.entity import Exchange, Queue
from kombu.exceptions import BatchPublishError, ChannelError, OperationalError
from redis.exceptions import RedisError

from ..spec.precision import Precision

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


def shard_queue(model: str, precision: Precision) -> str:
    """Name the queue that workers with this model in this precision listen to."""
    return f"headrace.bulk.{_model_key(model, precision)}"


def live_queue(model: str, precision: Precision) -> str:
    """Name the queue of the same workers for interactive requests."""
    return f"headrace.live.{_model_key(model, precision)}"


def _model_key(model: str, precision: Precision) -> str:
    kv_cache = [] if precision.kv_cache_dtype == "auto" else [f"kv_cache:{precision.kv_cache_dtype}"]
    named = [model, precision.dtype, *([precision.quantization] if precision.quantization else []), *kv_cache]
    return hashlib.sha256("|".join(named).encode()).hexdigest()[:12]


def broker_url(redis_url: str) -> str:
    """Say a redis-py URL in Celery's words: they differ for UNIX sockets."""
    parts = urlsplit(redis_url)
    if parts.scheme != "unix":
        return redis_url
    options = dict(parse_qsl(parts.query))
    # Celery's have these in the place where redis-py too has them for other addresses.
    user, password = (quote(options.pop(name, ""), safe="") for name in ("username", "password"))
    user, password = parts.username or user, parts.password or password
    if "db" in options:
        options["virtual_host"] = options.pop("db")
    whose = f"{user}:{password}@" if user or password else ""
    return f"redis+socket://{whose}{parts.path}" + (f"?{urlencode(options)}" if options else "")


def create_app(redis_url: str) -> Celery:
    """Make the application for producers and workers alike; connects to nothing yet."""
    app = Celery("headrace", broker=broker_url(redis_url), set_as_current=False)
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
        # Of tasks that are acknowledged late, of which we have none; not said, Celery warns of it at each outage.
        worker_cancel_long_running_tasks_on_connection_loss=True,
    )
    return app


def send_shards(app: Celery, queue: str, shard_ids: Sequence[str], priority: int = BULK_PRIORITY) -> None:
    """Publish one message a shard, pipelined over one connection.

    Raises kombu's OperationalError when Redis cannot be reached; some messages may be out by then.
    """
    # Redis makes a queue with its first message. To declare it would be to connect anew where the connection is lost,
    # and the batch would go on with the channel of the old one.
    to = {"queue": kombu_queue(queue), "declare": [], "priority": priority}
    try:
        with app.producer_pool.acquire(block=True) as producer, producer.batch(_BATCH_MESSAGES):
            for shard_id in shard_ids:
                app.send_task(RUN_SHARD, args=[shard_id], producer=producer, **to)
    except BatchPublishError as error:
        raise OperationalError(str(error.__cause__)) from error


def ring_for_shards(app: Celery, queue: str, shard_ids: Sequence[str]) -> None:
    """As `send_shards`, for shards that the ledger has already.

    What Redis does not take is only told of: a worker's sweeper finds whatever was not rung for.
    """
    try:
        send_shards(app, queue, shard_ids)
    except (OperationalError, RedisError) as error:
        # By their number: a large job has thousands.
        logger.warning(
            "queued all the same, for workers to find: Redis took no message of %d shards: %s", len(shard_ids), error
        )


def ring_for_requests(app: Celery, queue: str, request_ids: Sequence[str]) -> None:
    """Ring for interactive requests that Redis knows. As above, what it does not take is only told of."""
    try:
        with app.producer_pool.acquire(block=True) as producer:
            for start in range(0, len(request_ids), _REQUESTS_PER_BELL):
                some = request_ids[start : start + _REQUESTS_PER_BELL]
                # Not through `send_task`: nobody would read a task's headers.
                producer.publish(some, exchange="", routing_key=queue, serializer="json", priority=RESCUE_PRIORITY)
    except (OperationalError, RedisError) as error:
        logger.warning("%d requests wait for a sweeper, Redis took no message of them: %s", len(request_ids), error)


def queue_is_empty(app: Celery, queue: str) -> bool:
    """Whether no message waits. Raises kombu's OperationalError or redis' errors when Redis cannot be reached."""
    with app.connection_for_read() as connection, connection.channel() as channel:
        try:
            return bool(channel.queue_declare(queue, passive=True).message_count == 0)
        except ChannelError:
            # Redis has no empty lists: a drained queue does not exist.
            return True


def kombu_queue(name: str) -> Queue:
    """A queue by its name, as Celery sends to it and listens."""
    # The nameless exchange delivers to the queue named by the routing key, without the binding table that a
    # Redis restarted empty would lack.
    return Queue(name, exchange=Exchange(""), routing_key=name)
