"""`/metrics` in Prometheus' text format: what the ledger and Redis say when they are asked, and this server's requests.

What is counted over all jobs counts from when this process began: with several of them, take the `max`, not the sum.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

from fastapi import APIRouter, Request, Response
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from redis.exceptions import RedisError
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...storage.errors import LedgerError
from ...storage.ledger.overview import Overview, Totals, Waiting
from ..client.client import Client
from ..embedded.valkey import EmbeddedValkeyError
from ..workers.presence import Worker, WorkerPresence
from .errors import CLIENT_CLOSED_REQUEST
from .latencies import Latencies

logger = logging.getLogger(__name__)

_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_UNKNOWN_ROUTE = "none"
_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
router = APIRouter(tags=["metrics"])


class Metrics:
    """What this process has to tell. `num_waiting_live`: how many live requests of a queue no worker has taken."""

    def __init__(self, client: Client, num_waiting_live: Callable[[str], int], live_queues: Iterable[str]) -> None:
        self._registry = CollectorRegistry()
        self.num_requests = Counter(
            "headrace_http_requests", "Requests answered.", ("method", "route", "status"), registry=self._registry
        )
        self.seconds = Histogram(
            "headrace_http_request_seconds",
            "From a request's arrival to the last byte of its answer; streams take as long as their answer does.",
            ("method", "route"),
            buckets=_BUCKETS,
            registry=self._registry,
        )
        self.num_open = Gauge("headrace_http_requests_open", "Requests under way.", registry=self._registry)
        self.latencies = Latencies()
        self._registry.register(self.latencies)
        self._registry.register(_OfLedger(client.ledger.overview))
        self._registry.register(_OfRedis(client.redis_url, num_waiting_live, tuple(live_queues)))

    def text(self) -> bytes:
        """Asks the ledger and Redis; of one that does not answer there is nothing in it but that."""
        return generate_latest(self._registry)


@router.get("/metrics", response_class=Response, responses={200: {"content": {_CONTENT_TYPE: {}}}})
def get_metrics(request: Request) -> Response:
    """Jobs, queues, workers, engines and requests, for Prometheus."""
    metrics: Metrics = request.app.state.metrics
    return Response(metrics.text(), media_type=_CONTENT_TYPE)


class CountRequests:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status: int | None = None

        async def note_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        begin = time.perf_counter()
        self._metrics.num_open.inc()
        try:
            await self._app(scope, receive, note_status)
        except ClientDisconnect:
            raise
        except Exception:
            # Answered outside of all middleware.
            status = status or 500
            raise
        finally:
            self._metrics.num_open.dec()
            # Neither the path nor a method of the client's invention: each value is kept for good.
            route = getattr(scope.get("route"), "path", _UNKNOWN_ROUTE)
            method = scope["method"] if scope["method"] in _METHODS else "other"
            self._metrics.num_requests.labels(method, route, str(status or CLIENT_CLOSED_REQUEST)).inc()
            self._metrics.seconds.labels(method, route).observe(time.perf_counter() - begin)


class _OfLedger(Collector):
    def __init__(self, overview: Overview) -> None:
        self._overview = overview
        self._grown = _Grown()
        # What is committed before the first scrape counts too.
        with suppress(LedgerError):
            self._grown.since_start(overview.totals())

    def collect(self) -> list[Metric]:
        up = GaugeMetricFamily("headrace_ledger_up", "Whether the database answers.")
        return _if_it_answers(up, self._asked, LedgerError)

    def _asked(self) -> Iterator[Metric]:
        jobs = GaugeMetricFamily("headrace_jobs", "Jobs there are.", labels=["state"])
        for state, count in self._overview.jobs_by_state().items():
            jobs.add_metric([state], count)
        yield jobs
        yield from _queues(self._overview.waiting())
        yield from _work(self._grown.since_start(self._overview.totals()))


def _if_it_answers(
    up: GaugeMetricFamily, ask: Callable[[], Iterable[Metric]], *errors: type[Exception]
) -> list[Metric]:
    """All that there is to ask of it, or nothing but that it is away."""
    try:
        metrics = list(ask())
    except errors as error:
        logger.warning("metrics: %s", error)
        up.add_metric([], 0)
        return [up]
    up.add_metric([], 1)
    return [up, *metrics]


def _queues(waiting: Iterable[Waiting]) -> Iterator[Metric]:
    shards = GaugeMetricFamily("headrace_queue_shards", "Shards of running jobs.", labels=["queue", "state"])
    rows = GaugeMetricFamily("headrace_queue_rows", "Rows of shards that no worker has.", labels=["queue"])
    oldest = GaugeMetricFamily(
        "headrace_queue_oldest_seconds",
        "How long the oldest job with a shard that waits has been there.",
        labels=["queue"],
    )
    for queue in waiting:
        shards.add_metric([queue.queue, "queued"], queue.num_queued)
        shards.add_metric([queue.queue, "running"], queue.num_running)
        rows.add_metric([queue.queue], queue.queued_rows)
        oldest.add_metric([queue.queue], queue.oldest_seconds)
    yield from (shards, rows, oldest)


def _work(totals: Totals) -> Iterator[Metric]:
    rows = CounterMetricFamily("headrace_rows", "Rows committed since this process began.", labels=["outcome"])
    rows.add_metric(["answered"], totals.rows - totals.failed_rows)
    rows.add_metric(["failed"], totals.failed_rows)
    tokens = CounterMetricFamily(
        "headrace_tokens", "Tokens of those rows; cached ones are among those of prompts.", labels=["kind"]
    )
    tokens.add_metric(["prompt"], totals.prompt_tokens)
    tokens.add_metric(["cached"], totals.cached_tokens)
    tokens.add_metric(["completion"], totals.completion_tokens)
    yield from (rows, tokens)


class _Grown:
    """Sums that only grow: a job that is deleted takes its share of the ledger's with it. Thread-safe."""

    def __init__(self) -> None:
        self._last: Totals | None = None
        self._grown = dict.fromkeys(Totals.__dataclass_fields__, 0)
        self._lock = threading.Lock()

    def since_start(self, now: Totals) -> Totals:
        with self._lock:
            before, self._last = self._last or now, now
            for name in self._grown:
                self._grown[name] += max(0, getattr(now, name) - getattr(before, name))
            return Totals(**self._grown)


_ENGINE_GAUGES = {
    "num_running": ("headrace_engine_running_sequences", "Sequences in the engine's batch."),
    "num_waiting": ("headrace_engine_waiting_sequences", "Sequences that wait for a place in it."),
    "stalled_seconds": ("headrace_engine_stalled_seconds", "For how long it has not got on with a step."),
}
_ENGINE_COUNTERS = {
    "num_steps": ("headrace_engine_steps", "Steps the engine has done."),
    "num_computed_tokens": ("headrace_engine_computed_tokens", "Tokens it has computed, those of prompts included."),
    "num_preemptions": ("headrace_engine_preemptions", "Sequences that had to give up their KV blocks."),
    "num_draft_tokens": ("headrace_engine_spec_decode_draft_tokens", "Tokens guessed by speculative decoding."),
    "num_accepted_tokens": ("headrace_engine_spec_decode_accepted_tokens", "Those that were guessed right."),
}


class _OfRedis(Collector):
    def __init__(self, redis_url: str, num_waiting_live: Callable[[str], int], live_queues: tuple[str, ...]) -> None:
        self._presence = WorkerPresence(redis_url)
        self._num_waiting_live = num_waiting_live
        self._live_queues = live_queues

    def collect(self) -> list[Metric]:
        up = GaugeMetricFamily("headrace_redis_up", "Whether Redis answers.")
        return _if_it_answers(up, self._asked, RedisError, EmbeddedValkeyError)

    def _asked(self) -> Iterator[Metric]:
        live = GaugeMetricFamily("headrace_live_requests_waiting", "Requests that no worker has.", labels=["queue"])
        for queue in self._live_queues:
            live.add_metric([queue], self._num_waiting_live(queue))
        yield live
        yield from _of_workers(self._presence.workers())


def _of_workers(workers: list[Worker]) -> Iterator[Metric]:
    alive = GaugeMetricFamily("headrace_workers", "Workers alive.", labels=["queue"])
    for queue in sorted({worker.queue for worker in workers}):
        alive.add_metric([queue], sum(worker.queue == queue for worker in workers))
    yield alive
    labels = ["worker", "queue"]
    in_use = GaugeMetricFamily("headrace_engine_kv_usage", "Share of KV blocks in use, 0 to 1.", labels=labels)
    for worker in workers:
        if num_blocks := worker.stats.get("num_blocks"):
            free = worker.stats.get("num_available_blocks", 0.0)
            in_use.add_metric([worker.name, worker.queue], 1 - free / num_blocks)
    yield in_use
    for kinds, family in ((_ENGINE_GAUGES, GaugeMetricFamily), (_ENGINE_COUNTERS, CounterMetricFamily)):
        for stat, (name, text) in kinds.items():
            metric = family(name, text, labels=labels)
            for worker in workers:
                if stat in worker.stats:
                    metric.add_metric([worker.name, worker.queue], worker.stats[stat])
            yield metric
