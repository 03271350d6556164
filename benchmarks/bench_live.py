"""What the queue adds to the time until an interactive request's first token, and what such a request waits for.

    python benchmarks/bench_live.py [--requests 200] [--max-tokens 8] [--beside-bulk 30] [--beside-prompts 20]
        [--output FILE]

The ticket model, one request after the other: first through `EngineHost.submit` in this process, then through Redis
and a worker of its own process to a reader of the stream. Both must give the same tokens. Then, with bulk rows in
every seat of the engine, how many of its steps a request waits for its first token, its own included. Then so many
requests (`--beside-bulk`) through Redis and through HTTP, to a worker that is idle and to one whose seats are all taken
by the rows of a bulk job. Last, a model of SmolLM2-135M's shape, whose steps are full of bulk rows' prompts: how long
so many requests (`--beside-prompts`) wait for their first and for each further token. The last line is JSON.
"""

import argparse
import asyncio
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from statistics import median
from typing import Any

from bench_api import body
from redis import Redis
from report import ROOT, milliseconds, print_result
from services import PATIENCE_SECONDS, new_key, server, worker
from shapes import checkpoint
from sse_client import stream_one

from headrace.engine.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.request import Request, RequestEvent
from headrace.engine.sampling_params import SamplingParams
from headrace.jobs.client.client import Client
from headrace.jobs.hosting.engine_host import EngineHost
from headrace.jobs.hosting.outcomes import Outcome
from headrace.jobs.live.asking import new_request
from headrace.jobs.live.requests import LiveRequest
from headrace.jobs.settings import Settings
from headrace.jobs.streams.reader import follow
from headrace.jobs.workers.presence import WorkerPresence

MODEL = ROOT / "examples" / "tickets" / "model"
WARM_UP = 10
LONGEST_PAUSE_SECONDS = 0.1
BESIDE_TOKENS = 2
Ask = Callable[[LiveRequest, int], float]
BULK_ROWS = 64
BULK_TOKENS = 1500
# Of a bulk row, nothing of it shared; as many as keep the engine full of prompts to the end.
BULK_PROMPT_TOKENS, BULK_ANSWER_TOKENS, BULK_ROWS_A_REQUEST = 512, 8, 80
LIVE_TOKENS = 16


@dataclass(frozen=True)
class Timed:
    """One answer. `first_token`, `end`: seconds from when it was asked for."""

    first_token: float
    end: float
    token_ids: tuple[int, ...]


def asked(count: int, max_tokens: int) -> list[LiveRequest]:
    texts = (f"Ticket {number}: my parcel {number * 7919 % 100_003} has not arrived." for number in range(count))
    return [new_request(text, MODEL, max_tokens=max_tokens, ignore_eos=True, seed=0) for text in texts]


def engine_request(request: LiveRequest) -> Request:
    return Request(request.id, request.prompt_token_ids, request.sampling.params(None), priority=-1)


def through_host(host: EngineHost, request: LiveRequest) -> Timed:
    events: SimpleQueue[RequestEvent | Outcome] = SimpleQueue()
    start = time.perf_counter()
    host.submit([engine_request(request)], events.put, events.put)
    first = events.get(timeout=PATIENCE_SECONDS)
    first_token = time.perf_counter() - start
    tokens: list[int] = []
    while isinstance(first, RequestEvent):
        tokens += first.new_token_ids
        first = events.get(timeout=PATIENCE_SECONDS)
    return Timed(first_token, time.perf_counter() - start, tuple(tokens))


def through_queue(client: Client, redis: Redis, request: LiveRequest) -> Timed:
    start = time.perf_counter()
    client.live.submit(request)
    tokens: list[int] = []
    first_token = 0.0
    for event in follow(redis, request.id, timeout=PATIENCE_SECONDS):
        first_token = first_token or time.perf_counter() - start
        tokens += event.token_ids
    return Timed(first_token, time.perf_counter() - start, tuple(tokens))


def measure_idle(folder: Path, requests: list[LiveRequest]) -> dict[str, Any]:
    with EngineHost(Engine.from_pretrained(MODEL)) as host:
        alone = [through_host(host, request) for request in requests][WARM_UP:]
    env = {**os.environ, "HEADRACE_DATA_DIR": str(folder)}
    with (
        Client(Settings.from_environment(env)) as client,
        worker(env, folder / "worker.log", MODEL),
        Redis.from_url(client.redis_url, decode_responses=True) as redis,
    ):
        queued = [through_queue(client, redis, request) for request in requests][WARM_UP:]
    assert [each.token_ids for each in queued] == [each.token_ids for each in alone], "the queue changes answers"
    host_ttft, queue_ttft = (milliseconds([each.first_token for each in some]) for some in (alone, queued))
    return {
        "host_ttft_ms": host_ttft,
        "queue_ttft_ms": queue_ttft,
        # Of the medians alone: a difference of other quantiles is nobody's wait.
        "added_ttft_ms": {"median": queue_ttft["median"] - host_ttft["median"]},
        "host_answer_ms": milliseconds([each.end for each in alone])["median"],
        "queue_answer_ms": milliseconds([each.end for each in queued])["median"],
    }


def measure_beside_bulk(requests: list[LiveRequest]) -> dict[str, Any]:
    """Steps from handing a request over to its first token, while bulk rows hold every seat and more wait."""
    engine = Engine.from_pretrained(MODEL, EngineConfig(max_num_seqs=BULK_ROWS))
    params = SamplingParams(temperature=0, max_tokens=BULK_TOKENS, ignore_eos=True)
    rows = [Request(f"row {row}", [2, 5 + row, 7], params) for row in range(2 * BULK_ROWS)]
    with EngineHost(engine) as host:
        host.submit(rows, lambda _: None)
        while host.stats.num_running < BULK_ROWS:
            time.sleep(0.001)
        waits = [steps_to_first_token(host, request) for request in requests]
        assert host.stats.num_running >= BULK_ROWS, "the bulk rows have ended: nothing was measured"
    return {"bulk_rows_running": BULK_ROWS, "steps_to_first_token": {"median": median(waits), "max": max(waits)}}


def steps_to_first_token(host: EngineHost, request: LiveRequest) -> int:
    came, ended, steps = threading.Event(), threading.Event(), [0, 0]

    def on_tokens(_: RequestEvent) -> None:
        if not came.is_set():
            steps[1] = host.stats.num_steps
            came.set()

    steps[0] = host.stats.num_steps
    host.submit([engine_request(request)], lambda _: ended.set(), on_tokens)
    assert ended.wait(PATIENCE_SECONDS)
    return steps[1] - steps[0]


def measure_beside_prompts(count: int) -> dict[str, Any]:
    """Milliseconds to the first token and between tokens, and the tokens a second that the engine computes meanwhile.

    The first requests let the engine learn how much fits beside them.
    """
    generator = random.Random(0)

    def request(name: str, prompt_tokens: int, max_tokens: int, priority: int) -> Request:
        prompt = [generator.randrange(1000, 40_000) for _ in range(prompt_tokens)]
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        return Request(name, prompt, params, priority=priority)

    engine = Engine.from_pretrained(checkpoint("M1"), EngineConfig(dtype="bfloat16", num_gpu_blocks_override=8192))
    rows = (WARM_UP + count) * BULK_ROWS_A_REQUEST
    bulk = [request(f"row {row}", BULK_PROMPT_TOKENS, BULK_ANSWER_TOKENS, 0) for row in range(rows)]
    found = []
    with EngineHost(engine) as host:
        host.submit(bulk, lambda _: None)
        for number in range(WARM_UP + count):
            if number == WARM_UP:
                before, start = host.stats.num_computed_tokens, time.perf_counter()
            found.append(token_times(host, request(f"live {number}", 32, LIVE_TOKENS, -1)))
        speed = (host.stats.num_computed_tokens - before) / (time.perf_counter() - start)
        assert host.stats.num_waiting, "the bulk rows have ended: something else was measured"
    gaps = [later - earlier for times in found[WARM_UP:] for earlier, later in pairwise(times[1:])]
    first = [times[1] - times[0] for times in found[WARM_UP:]]
    return {"ttft_ms": milliseconds(first), "gap_ms": milliseconds(gaps), "computed_tokens_per_second": round(speed)}


def token_times(host: EngineHost, request: Request) -> list[float]:
    """When it was asked for and when each of its tokens came, in seconds."""
    ended, times = threading.Event(), [time.perf_counter()]
    host.submit([request], lambda _: ended.set(), lambda _: times.append(time.perf_counter()))
    assert ended.wait(PATIENCE_SECONDS)
    return times


@contextmanager
def bulk_job(client: Client, folder: Path, presence: WorkerPresence) -> Iterator[None]:
    """A bulk job that has all seats of the worker for as long as this is open."""
    rows = [{"text": f"Ticket {row}"} for row in range(4 * BULK_ROWS)]
    job = client.submit(rows, MODEL, folder / "out", prompt="{text}", max_tokens=BULK_TOKENS, ignore_eos=True)
    try:
        wait_for_rows(presence)
        yield
        wait_for_rows(presence)
    finally:
        job.cancel()


def wait_for_rows(presence: WorkerPresence) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while engine_stats(presence).get("num_running", 0) < BULK_ROWS:
        if time.monotonic() > deadline:
            raise RuntimeError("the bulk rows do not run")
        time.sleep(0.05)


def engine_stats(presence: WorkerPresence) -> dict[str, float]:
    return next((dict(each.stats) for each in presence.workers()), {})


def news(presence: WorkerPresence) -> tuple[float, float]:
    """The number of steps when it is next told (once a second), and that moment."""
    before = engine_stats(presence)["num_steps"]
    while (now := engine_stats(presence)["num_steps"]) == before:
        time.sleep(0.002)
    return now, time.monotonic()


def measure_through_worker(folder: Path, count: int) -> dict[str, Any]:
    """Until the first token, idle and beside a bulk job.

    `added_in_steps`: what the job adds, in steps of its engine: the rest of the one under way, on average half of it,
    and that the request's own step has the job's rows in it, too.
    """
    env = {**os.environ, "HEADRACE_DATA_DIR": str(folder)}
    key, requests = new_key(env, "bench"), asked(2 * (WARM_UP + count), BESIDE_TOKENS)
    with (
        Client(Settings.from_environment(env)) as client,
        worker(env, folder / "worker.log", MODEL, ["--max-num-seqs", str(BULK_ROWS)]),
        server(env, folder / "server.log", MODEL) as (_, url),
        Redis.from_url(client.redis_url, decode_responses=True) as redis,
        WorkerPresence(client.redis_url) as presence,
    ):
        ways: dict[str, Ask] = {
            "redis": lambda request, _: through_queue(client, redis, request).first_token,
            "http": lambda _, number: asyncio.run(stream_one(url, key, body(number, BESIDE_TOKENS))).first_token,
        }
        idle = {name: first_tokens(ask, requests[: WARM_UP + count]) for name, ask in ways.items()}
        with bulk_job(client, folder, presence):
            beside = {name: in_steps(presence, ask, requests[WARM_UP + count :]) for name, ask in ways.items()}
    return {name: _compared(idle[name], *beside[name]) for name in ways}


def in_steps(presence: WorkerPresence, ask: Ask, requests: list[LiveRequest]) -> tuple[list[float], float]:
    """Until each first token, and how long the engine's steps took meanwhile, both in seconds."""
    first, start = news(presence)
    found = first_tokens(ask, requests)
    last, end = news(presence)
    return found, (end - start) / (last - first)


def first_tokens(ask: Ask, requests: list[LiveRequest]) -> list[float]:
    found = []
    for number, request in enumerate(requests):
        # Users come at any moment of a step: not, as here, just after the end of an answer.
        time.sleep(number * 0.618 % 1 * LONGEST_PAUSE_SECONDS)
        found.append(ask(request, number))
    return found[WARM_UP:]


def _compared(idle: list[float], beside: list[float], step: float) -> dict[str, Any]:
    found = milliseconds(idle), milliseconds(beside)
    waited = {name: round((found[1][name] - found[0][name]) / (1e3 * step), 2) for name in ("median", "p95")}
    return {
        "idle_ttft_ms": found[0],
        "beside_bulk_ttft_ms": found[1],
        "step_ms": round(1e3 * step, 3),
        "added_in_steps": waited,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=8)
    parser.add_argument("--beside-bulk", type=int, default=30, help="requests to a worker with a bulk job; 0: none")
    parser.add_argument("--beside-prompts", type=int, default=20, help="requests beside bulk rows' prompts; 0: none")
    parser.add_argument("--output", type=Path, help="where to write the JSON line as well")
    options = parser.parse_args()
    requests = asked(WARM_UP + options.requests, options.max_tokens)
    with tempfile.TemporaryDirectory() as folder:
        idle = measure_idle(Path(folder), requests)
    for name in ("host_ttft_ms", "queue_ttft_ms", "added_ttft_ms"):
        print(f"{name:15} " + "  ".join(f"{key} {value:.2f}" for key, value in idle[name].items()))
    bulk = measure_beside_bulk(requests[:50])
    print(f"beside bulk: {bulk['steps_to_first_token']}")
    through: dict[str, Any] = {}
    if options.beside_bulk:
        with tempfile.TemporaryDirectory() as folder:
            through = measure_through_worker(Path(folder), options.beside_bulk)
        print(f"beside a bulk job: {through['redis']}, HTTP {through['http']}")
    prompts: dict[str, Any] = {}
    if options.beside_prompts:
        prompts = measure_beside_prompts(options.beside_prompts)
        print(f"beside prompts: {prompts}")
    beside = {"beside_bulk": bulk, "through_worker_beside_bulk": through, "beside_prompts": prompts}
    print_result("live", {"requests": options.requests, **idle, **beside}, options.output)


if __name__ == "__main__":
    main()
