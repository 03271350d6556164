"""Streaming answers through the HTTP API, a worker and Redis, beside the engine called in process on the same cores.

    python benchmarks/bench_api.py [--streams 200] [--max-tokens 128] [--requests 50] [--flood 400]

The ticket model. First in this process: requests one after the other, then all streams at once. Then the same through
`headrace serve` and `headrace worker`, this process being the client; every text must be the same. Last, one tenant
sends a flood and another one request after the other. The last line is JSON.
"""

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from redis import Redis
from report import ROOT, milliseconds, print_result
from services import cpu_seconds, new_key, server, worker
from sse_client import Streamed, stream_all, stream_one

from headrace.engine.detokenizer import answer_text
from headrace.engine.engine import Engine
from headrace.engine.request import Request, RequestEvent
from headrace.engine.tokenizer import Tokenizer
from headrace.jobs.client import Client
from headrace.jobs.engine_host import Answer, EngineHost, Outcome
from headrace.jobs.live.asking import new_request
from headrace.jobs.settings import Settings

MODEL = ROOT / "examples" / "tickets" / "model"
PATIENCE_SECONDS = 60.0
WARM_UP = 5
IDLE_TOKENS = 16


@dataclass(frozen=True)
class Running:
    """The services under test. `pids`: by what they are."""

    url: str
    redis_url: str
    pids: dict[str, int]


def body(number: int, max_tokens: int) -> dict[str, Any]:
    text = f"Ticket {number}: my parcel {number * 7919 % 100_003} has not arrived."
    message = {"role": "user", "content": text}
    return {
        "model": MODEL.name,
        "messages": [message],
        "max_tokens": max_tokens,
        "min_tokens": max_tokens,
        "temperature": 0,
    }


def engine_request(asked: dict[str, Any]) -> Request:
    """What a worker makes of a body."""
    made = new_request(
        asked["messages"], MODEL, max_tokens=asked["max_tokens"], min_tokens=asked["min_tokens"], temperature=0
    )
    return Request(made.id, made.prompt_token_ids, made.sampling.params(0, None), priority=-1)


def in_process(host: EngineHost, tokenizer: Tokenizer, requests: Sequence[Request]) -> list[Streamed]:
    """Hands all over at once."""
    came: SimpleQueue[tuple[float, RequestEvent | Outcome]] = SimpleQueue()

    def note(what: RequestEvent | Outcome) -> None:
        came.put((time.perf_counter(), what))

    start = time.perf_counter()
    host.submit(requests, note, note)
    arrivals: dict[str, list[float]] = {request.request_id: [] for request in requests}
    answers: dict[str, tuple[float, Answer]] = {}
    while len(answers) < len(requests):
        now, what = came.get(timeout=PATIENCE_SECONDS)
        if isinstance(what, RequestEvent):
            arrivals[what.request_id].append(now)
        else:
            assert isinstance(what, Answer), what
            answers[what.request_id] = now, what
    return [
        _streamed(tokenizer, each, start, arrivals[each.request_id], *answers[each.request_id]) for each in requests
    ]


def _streamed(
    tokenizer: Tokenizer, request: Request, start: float, arrivals: list[float], end: float, answer: Answer
) -> Streamed:
    text = answer_text(tokenizer, request, answer.token_ids, answer.finish_reason)
    return Streamed(start, tuple(arrivals), end, text, len(answer.token_ids))


def tokens_per_second(answers: Sequence[Streamed]) -> float:
    seconds = max(each.end for each in answers) - min(each.start for each in answers)
    return float(sum(each.num_tokens for each in answers) / seconds)


def latencies(answers: Sequence[Streamed]) -> dict[str, Any]:
    return {
        "ttft_ms": milliseconds([each.first_token for each in answers]),
        "between_chunks_ms": milliseconds([gap for each in answers for gap in each.gaps]),
        "total_ms": milliseconds([each.total for each in answers]),
    }


def check(answers: Sequence[Streamed], expected: Sequence[Streamed]) -> None:
    for number, (answer, known) in enumerate(zip(answers, expected, strict=True)):
        assert answer.text == known.text, f"answer {number} is {answer.text!r} instead of {known.text!r}"
        assert answer.num_tokens == known.num_tokens, f"answer {number} has {answer.num_tokens} tokens"


async def one_by_one(ask: Callable[[int], Any], count: int) -> list[Streamed]:
    return [await ask(number) for number in range(count)][WARM_UP:]


def measure_streams(running: Running, key: str, bodies: list[dict[str, Any]], alone: list[Streamed]) -> dict[str, Any]:
    """All streams at once: speed, latencies, and what they cost whom."""
    with Redis.from_url(running.redis_url) as redis:
        # Threads, connections and the caches of keys are there before.
        check(asyncio.run(stream_all(running.url, key, bodies)), alone)
        before = {name: cpu_seconds(pid) for name, pid in running.pids.items()}
        redis.config_resetstat()
        answers = asyncio.run(stream_all(running.url, key, bodies))
        found: dict[str, Any] = redis.info("commandstats")
        taken = {name: cpu_seconds(pid) - before[name] for name, pid in running.pids.items()}
    check(answers, alone)
    num_tokens = sum(each.num_tokens for each in answers)
    operations = {name.removeprefix("cmdstat_"): stat["calls"] / num_tokens for name, stat in found.items()}
    return {
        "tokens_per_second": tokens_per_second(answers),
        **latencies(answers),
        "tokens_per_chunk": num_tokens / sum(len(each.arrivals) for each in answers),
        "cpu_us_per_token": {name: 1e6 * seconds / num_tokens for name, seconds in taken.items()},
        "redis_operations_per_token": {name: round(calls, 3) for name, calls in operations.items() if calls > 0.005},
    }


async def beside_a_flood(url: str, flooding: str, asking: str, flood: int) -> list[Streamed]:
    """One short request after the other, from when the flood has begun to come back until it is over."""
    # Of different lengths: seats come free one by one.
    bodies = [body(number, 32 + number * 37 % 97) for number in range(flood)]
    others = asyncio.gather(*(stream_one(url, flooding, each) for each in bodies))
    answers: list[Streamed] = []
    await asyncio.sleep(1.0)
    while not others.done():
        answers.append(await stream_one(url, asking, body(len(answers), IDLE_TOKENS)))
    await others
    return answers


def measure_fairness(running: Running, keys: tuple[str, str], flood: int) -> dict[str, Any]:
    """`fair`: another tenant's requests beside the flood; `unfair`: the flooding tenant's own, which wait behind it."""
    noisy, quiet = keys
    figures = {}
    for name, asking in (("fair", quiet), ("unfair", noisy)):
        answers = asyncio.run(beside_a_flood(running.url, noisy, asking, flood))
        of = {"ttft_ms": [each.first_token for each in answers], "total_ms": [each.total for each in answers]}
        figures[name] = {"requests": len(answers), **{what: milliseconds(values) for what, values in of.items()}}
    return figures


def measure_alone(options: argparse.Namespace) -> tuple[list[Streamed], list[Streamed]]:
    """In this process: one request after the other, then all streams at once."""
    tokenizer = Tokenizer.from_pretrained(MODEL)
    with EngineHost(Engine.from_pretrained(MODEL)) as host:
        ask = partial(in_process, host, tokenizer)
        single = [ask([engine_request(body(number, IDLE_TOKENS))])[0] for number in range(options.requests + WARM_UP)]
        requests = [engine_request(body(number, options.max_tokens)) for number in range(options.streams)]
        ask(requests)
        return single[WARM_UP:], ask([engine_request(body(n, options.max_tokens)) for n in range(options.streams)])


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    single, alone = measure_alone(options)
    env = {**os.environ, "HEADRACE_DATA_DIR": str(folder)}
    keys = new_key(env, "noisy"), new_key(env, "quiet")
    with (
        Client(Settings.from_environment(env)) as client,
        Redis.from_url(client.redis_url) as redis,
        worker(env, folder / "worker.log", MODEL) as worker_pid,
        server(env, folder / "server.log", MODEL) as (server_pid, url),
    ):
        redis_pid: Any = redis.info("server")["process_id"]
        pids = {"worker": worker_pid, "server": server_pid, "redis": redis_pid, "client": os.getpid()}
        running = Running(url, client.redis_url, pids)
        ask = lambda number: stream_one(url, keys[1], body(number, IDLE_TOKENS))  # noqa: E731
        idle = asyncio.run(one_by_one(ask, options.requests + WARM_UP))
        check(idle, single)
        bodies = [body(number, options.max_tokens) for number in range(options.streams)]
        streams = measure_streams(running, keys[1], bodies, alone)
        fairness = measure_fairness(running, keys, options.flood) if options.flood else {}
    return {
        "idle": {"in_process": latencies(single), "api": latencies(idle)},
        "in_process": {"tokens_per_second": tokens_per_second(alone), **latencies(alone)},
        "api": streams,
        "ratio": streams["tokens_per_second"] / tokens_per_second(alone),
        "two_tenants": fairness,
    }


def show(figures: dict[str, Any]) -> None:
    for where in ("in_process", "api"):
        single, streams = figures["idle"][where], figures[where]
        print(f"{where}: idle TTFT {single['ttft_ms']['median']:.1f} ms (p95 {single['ttft_ms']['p95']:.1f})", end=", ")
        print(f"{streams['tokens_per_second']:.0f} tokens/s, ttft {streams['ttft_ms']}, {streams['between_chunks_ms']}")
    print(f"ratio {figures['ratio']:.3f}, CPU µs a token {figures['api']['cpu_us_per_token']}")
    print(f"Redis operations a token {figures['api']['redis_operations_per_token']}")
    for name, found in figures["two_tenants"].items():
        print(f"{name}: {found}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--requests", type=int, default=50, help="one after the other, on an idle system")
    parser.add_argument("--flood", type=int, default=400, help="requests of the flooding tenant; 0: leave it out")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(Path(folder), options)
    show(figures)
    print_result("api", {"streams": options.streams, "max_tokens": options.max_tokens, **figures})


if __name__ == "__main__":
    main()
