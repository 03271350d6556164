"""What grows while the system runs for long: waves of live requests and jobs, and what is held after each of them.

    python benchmarks/bench_soak.py [--waves 10] [--requests 120] [--rows 200] [--output FILE]

The ticket model, behind `headrace serve` and `headrace worker` with an embedded Valkey and SQLite. A wave is so many
streamed chats at once, each with a text of its own: a third is read to its end, a third left after its first event,
a third follows a JSON schema of its own; beside them a job, deleted with its data set when it has completed. What is
to be seen is the growth over the later half of the waves: caches are filled by then. The last line is JSON.
"""

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx2
import psutil
from redis import Redis
from report import ROOT, print_result
from services import PATIENCE_SECONDS, new_key, server, worker

from headrace.jobs.client.client import Client
from headrace.jobs.settings import Settings

MODEL = ROOT / "examples" / "tickets" / "model"
STREAM_SECONDS = 2
KINDS = ("whole", "left", "schema")
# Little, so that all of it is in use soon: memory counts only once it has been written to.
KV_CACHE = ("--kv-cache-memory-bytes", str(2**25))
# Two that kombu declares once.
KEYS_OF_KOMBU = "_kombu.binding*"


@dataclass(frozen=True)
class Held:
    """After a wave, with nothing left to do. `lasting_keys`: those in Redis that never expire by themselves."""

    worker_mib: float
    server_mib: float
    threads: int
    open_files: int
    keys: int
    lasting_keys: int
    ledger_kib: float
    files: int


def body(number: int, kind: str) -> dict[str, Any]:
    message = {"role": "user", "content": f"Ticket {number}: my parcel {number * 7919 % 100_003} has not arrived."}
    asked: dict[str, Any] = {"model": MODEL.name, "messages": [message], "temperature": 0, "stream": True}
    if kind == "left":
        return asked | {"max_tokens": 200, "min_tokens": 200}
    if kind == "schema":
        field = {f"field_{number}": {"enum": ["yes", "no"]}}
        schema = {"type": "object", "properties": field, "required": [*field], "additionalProperties": False}
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        return asked | {"max_tokens": 40, "response_format": form}
    return asked | {"max_tokens": 8}


async def stream(client: httpx2.AsyncClient, number: int, kind: str) -> None:
    async with client.stream("POST", "/v1/chat/completions", json=body(number, kind)) as answer:
        answer.raise_for_status()
        last = ""
        async for line in answer.aiter_lines():
            last = line or last
            if kind == "left" and line:
                return
    if last != "data: [DONE]":
        raise RuntimeError(f"an answer ended with {last!r}")


async def ask_all(url: str, key: str, numbers: Iterable[int]) -> None:
    headers = {"Authorization": f"Bearer {key}"}
    async with httpx2.AsyncClient(base_url=url, headers=headers, timeout=PATIENCE_SECONDS) as client:
        await asyncio.gather(*(stream(client, number, KINDS[number % len(KINDS)]) for number in numbers))


def wave(client: Client, url: str, key: str, folder: Path, number: int, options: argparse.Namespace) -> None:
    rows = [{"text": f"Ticket {number}-{row}"} for row in range(options.rows)]
    job = client.submit(rows, MODEL, folder / f"out-{number}", prompt="{text}", max_tokens=5)
    asyncio.run(ask_all(url, key, range(number * options.requests, (number + 1) * options.requests)))
    if (failed := job.wait(PATIENCE_SECONDS, start_worker=False).rows_failed) > 0:
        raise RuntimeError(f"{failed} rows failed")
    job.delete(with_output=True)


def held(folder: Path, redis: Redis, pids: tuple[int, int]) -> Held:
    """Once streams that have ended are no longer kept."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while any(redis.scan_iter("headrace:stream:*", count=1000)) and time.monotonic() < deadline:
        time.sleep(0.1)
    processes = [psutil.Process(pid) for pid in pids]
    ours = set(redis.scan_iter(count=1000)) - set(redis.scan_iter(KEYS_OF_KOMBU))
    of_worker, of_server = (round(process.memory_info().rss / 2**20, 1) for process in processes)
    return Held(
        worker_mib=of_worker,
        server_mib=of_server,
        threads=sum(process.num_threads() for process in processes),
        open_files=sum(process.num_fds() for process in processes),
        keys=len(ours),
        lasting_keys=sum(redis.ttl(key) == -1 for key in ours),
        ledger_kib=(folder / "headrace.db").stat().st_size / 2**10,
        files=sum(path.is_file() for path in folder.rglob("*")),
    )


def measure(folder: Path, options: argparse.Namespace) -> list[Held]:
    env = {**os.environ, "HEADRACE_DATA_DIR": str(folder), "HEADRACE_STREAM_TTL_SECONDS": str(STREAM_SECONDS)}
    key, found = new_key(env, "soak"), []
    with (
        Client(Settings.from_environment(env)) as client,
        worker(env, folder / "worker.log", MODEL, KV_CACHE) as worker_pid,
        server(env, folder / "server.log", MODEL) as (server_pid, url),
        Redis.from_url(client.redis_url) as redis,
    ):
        print(" ".join(f"{name:>12}" for name in ("requests", *Held.__dataclass_fields__)))
        for number in range(options.waves):
            wave(client, url, key, folder, number, options)
            found.append(held(folder, redis, (worker_pid, server_pid)))
            values = ((number + 1) * options.requests, *asdict(found[-1]).values())
            print(" ".join(f"{value:12g}" for value in values), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--waves", type=int, default=10)
    parser.add_argument("--requests", type=int, default=120, help="a wave")
    parser.add_argument("--rows", type=int, default=200, help="of the job of a wave")
    parser.add_argument("--output", type=Path, help="where to write the JSON line as well")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), options)
    middle = (len(found) - 1) // 2
    first, before, last = (asdict(found[number]) for number in (0, middle, -1))
    thousands = (len(found) - 1 - middle) * options.requests / 1000
    growth = {name: round((last[name] - before[name]) / thousands, 2) for name in last} if thousands else {}
    print("a thousand requests of the later half: " + ", ".join(f"{name} {value:+g}" for name, value in growth.items()))
    asked = {"waves": options.waves, "requests_a_wave": options.requests, "rows_a_wave": options.rows}
    print_result("soak", {**asked, "first": first, "last": last, "growth_a_thousand": growth}, options.output)


if __name__ == "__main__":
    main()
