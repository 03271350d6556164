"""Streaming answers through the HTTP API, a worker and Redis, beside the engine called in process on the same cores.

    python benchmarks/bench_api.py [--streams 200] [--max-tokens 64] [--rounds 5] [--requests 50] [--flood 400]

The ticket model, in this process and through `headrace serve` and `headrace worker`, this process being the client:
requests one after the other, then rounds of all streams at once, both ways in turns. Every text must be the same. Last,
one tenant sends a flood and another one request after the other. The last line is JSON.
"""

import argparse
import asyncio
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from redis import Redis
from report import ROOT, milliseconds, print_result, spread
from services import cpu_seconds, new_key, server, worker
from sse_client import Streamed, stream_all, stream_one

from headrace.engine.engine import Engine
from headrace.engine.request import Request, RequestEvent
from headrace.engine.text.finished_answer import answer_text
from headrace.engine.text.tokenizer import Tokenizer
from headrace.jobs.client.client import Client
from headrace.jobs.hosting.engine_host import EngineHost
from headrace.jobs.hosting.outcomes import Answer, Outcome
from headrace.jobs.live.asking import new_request
from headrace.jobs.settings import Settings

MODEL = ROOT / "examples" / "tickets" / "model"
PATIENCE_SECONDS = 60.0
WARM_UP = 5
IDLE_TOKENS = 16
InProcess = Callable[[Sequence[Request]], list[Streamed]]


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
    return Request(made.id, made.prompt_token_ids, made.sampling.params(None), priority=-1)


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


@dataclass
class Cost:
    """What rounds through the API took, and whom. Takes the counters of the services at its beginning."""

    running: Running
    redis: Redis
    seconds: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count what happens inside."""
        before = {name: cpu_seconds(pid) for name, pid in self.running.pids.items()}
        self.redis.config_resetstat()
        yield
        found: dict[str, Any] = self.redis.info("commandstats")
        self.seconds.update({name: cpu_seconds(pid) - before[name] for name, pid in self.running.pids.items()})
        self.calls.update({name.removeprefix("cmdstat_"): stat["calls"] for name, stat in found.items()})

    def figures(self, num_tokens: int) -> dict[str, Any]:
        calls = {name: round(calls / num_tokens, 3) for name, calls in self.calls.items() if calls > 0.005 * num_tokens}
        return {
            "cpu_us_per_token": {name: round(1e6 * taken / num_tokens, 1) for name, taken in self.seconds.items()},
            "redis_operations_per_token": calls,
        }


@dataclass
class Rounds:
    """All streams at once, in process and through the API in turns."""

    alone: list[list[Streamed]] = field(default_factory=list)
    api: list[list[Streamed]] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        """The ratio is of each round's two: what the machine does meanwhile hits both alike."""
        speeds = {name: list(map(tokens_per_second, of)) for name, of in (("alone", self.alone), ("api", self.api))}
        ratios = [api / alone for api, alone in zip(speeds["api"], speeds["alone"], strict=True)]
        return {
            "in_process": {"tokens_per_second": spread(speeds["alone"]), **latencies(list(chain(*self.alone)))},
            "api": {
                "tokens_per_second": spread(speeds["api"]),
                **latencies(list(chain(*self.api))),
                "tokens_per_chunk": self.num_tokens / sum(len(each.arrivals) for each in chain(*self.api)),
            },
            "ratio": {**spread(ratios), "rounds": [round(ratio, 3) for ratio in ratios]},
        }

    @property
    def num_tokens(self) -> int:
        """Of the API's answers."""
        return sum(each.num_tokens for each in chain(*self.api))


def measure_streams(running: Running, key: str, options: argparse.Namespace, ask: InProcess) -> dict[str, Any]:
    bodies = [body(number, options.max_tokens) for number in range(options.streams)]

    def alone() -> list[Streamed]:
        return ask([engine_request(each) for each in bodies])

    def through() -> list[Streamed]:
        return asyncio.run(stream_all(running.url, key, bodies))

    # Threads, connections and the caches of keys are there before.
    check(through(), alone())
    rounds = Rounds()
    with Redis.from_url(running.redis_url) as redis:
        cost = Cost(running, redis)
        for number in range(options.rounds):
            # Every other round backwards.
            if number % 2:
                rounds.alone.append(alone())
            with cost.counting():
                rounds.api.append(through())
            if not number % 2:
                rounds.alone.append(alone())
            check(rounds.api[-1], rounds.alone[-1])
    figures = rounds.figures()
    figures["api"] |= cost.figures(rounds.num_tokens)
    return figures


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


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    env = {**os.environ, "HEADRACE_DATA_DIR": str(folder)}
    keys = new_key(env, "noisy"), new_key(env, "quiet")
    with (
        EngineHost(Engine.from_pretrained(MODEL)) as host,
        Client(Settings.from_environment(env)) as client,
        Redis.from_url(client.redis_url) as redis,
        worker(env, folder / "worker.log", MODEL) as worker_pid,
        server(env, folder / "server.log", MODEL) as (server_pid, url),
    ):
        redis_pid: Any = redis.info("server")["process_id"]
        pids = {"worker": worker_pid, "server": server_pid, "redis": redis_pid, "client": os.getpid()}
        running = Running(url, client.redis_url, pids)
        ask = partial(in_process, host, Tokenizer.from_pretrained(MODEL))
        idle = measure_idle(running, keys[1], options.requests + WARM_UP, ask)
        streams = measure_streams(running, keys[1], options, ask)
        fairness = measure_fairness(running, keys, options.flood) if options.flood else {}
    return {"idle": idle, **streams, "two_tenants": fairness}


def measure_idle(running: Running, key: str, count: int, ask: InProcess) -> dict[str, Any]:
    """One request after the other, in process and through the API."""
    alone = [ask([engine_request(body(number, IDLE_TOKENS))])[0] for number in range(count)][WARM_UP:]
    api = asyncio.run(one_by_one(lambda number: stream_one(running.url, key, body(number, IDLE_TOKENS)), count))
    check(api, alone)
    return {"in_process": latencies(alone), "api": latencies(api)}


def show(figures: dict[str, Any]) -> None:
    for where in ("in_process", "api"):
        single, streams = figures["idle"][where]["ttft_ms"], figures[where]
        print(f"{where}: idle TTFT {single['median']:.1f} ms (p95 {single['p95']:.1f})", end=", ")
        print(f"{streams['tokens_per_second']['median']:.0f} tokens/s, TTFT {streams['ttft_ms']}", end=", ")
        print(f"between chunks {streams['between_chunks_ms']}")
    print(f"ratio {figures['ratio']['median']:.3f}, of the rounds {figures['ratio']['rounds']}")
    print(f"CPU µs a token {figures['api']['cpu_us_per_token']}")
    print(f"Redis operations a token {figures['api']['redis_operations_per_token']}")
    for name, found in figures["two_tenants"].items():
        print(f"{name}: {found}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=50, help="one after the other, on an idle system")
    parser.add_argument("--flood", type=int, default=400, help="requests of the flooding tenant; 0: leave it out")
    parser.add_argument("--output", type=Path, help="where to write the JSON line as well")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(Path(folder), options)
    show(figures)
    print_result("api", {"streams": options.streams, "max_tokens": options.max_tokens, **figures}, options.output)


if __name__ == "__main__":
    main()
