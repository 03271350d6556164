"""Token streams beside plain pub/sub: what a flush costs the publisher and Redis, what an event costs its reader.

    python benchmarks/bench_streams.py [--streams 256] [--steps 100]

Every step brings each stream one token. The plain way is one PUBLISH a token, and reading what a subscriber gets: no
numbers, no replay. Nothing else may run. The last line is JSON.
"""

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from redis import Redis
from report import print_result, spread

from headrace.jobs.embedded.valkey import EmbeddedValkey
from headrace.jobs.streams.events import StreamEnd, StreamEvent
from headrace.jobs.streams.hub import StreamHub
from headrace.jobs.streams.publisher import StreamPublisher
from headrace.jobs.streams.reader import afollow, follow

TEXT = " token"


def measure_publisher(url: str, names: list[str], steps: int, reply_to: str) -> dict[str, Any]:
    """Each step is flushed by itself; the streams are left without an end."""
    appending, flushing, cpu = [], [], []
    with Redis.from_url(url) as redis, StreamPublisher(url) as publisher:
        for name in names:
            publisher.open(name, 1, reply_to)
        assert publisher.flush(10)
        redis.config_resetstat()
        for step in range(steps):
            used, start = time.process_time(), time.perf_counter()
            for name in names:
                publisher.append(name, (step,), (TEXT,))
            appended = time.perf_counter()
            assert publisher.flush(10)
            flushing.append(1000 * (time.perf_counter() - start))
            appending.append(1e6 * (appended - start) / len(names))
            cpu.append(1e6 * (time.process_time() - used) / len(names))
        operations = commands(redis, len(names) * steps)
        for name in names:
            publisher.finish(name, StreamEnd("stop"))
        assert publisher.flush(10)
    return {
        "ms_per_flush": spread(flushing),
        "append_us_per_token": spread(appending),
        "python_us_per_token": spread(cpu),
        "redis_operations_per_token": operations,
    }


def commands(redis: Redis, num_tokens: int) -> dict[str, float]:
    found: dict[str, Any] = redis.info("commandstats")
    ours = {name.removeprefix("cmdstat_"): stat["calls"] / num_tokens for name, stat in found.items()}
    return {name: round(calls, 4) for name, calls in sorted(ours.items()) if name != "config|resetstat"}


def measure_plain(url: str, names: list[str], steps: int) -> dict[str, Any]:
    """A PUBLISH a token, as a producer without any design would do it, with one subscriber to all channels."""
    publishing, reading = [], []
    with Redis.from_url(url, protocol=2) as redis, redis.pubsub() as subscriber:
        subscriber.subscribe(*names)
        for _ in names:
            subscriber.get_message(timeout=10)
        for step in range(steps):
            start = time.perf_counter()
            for name in names:
                redis.publish(name, json.dumps([step, TEXT]))
            published = time.perf_counter()
            for _ in names:
                message: Any = subscriber.get_message(timeout=10)
                assert json.loads(message["data"]) == [step, TEXT]
            publishing.append(1000 * (published - start))
            reading.append(1e6 * (time.perf_counter() - published) / len(names))
    return {"ms_per_flush": spread(publishing), "read_us_per_event": spread(reading)}


def measure_follow(url: str, names: list[str], num_events: int) -> float:
    start = time.perf_counter()
    for name in names:
        check(list(follow(url, name, timeout=10)), num_events)
    return 1e6 * (time.perf_counter() - start) / len(names) / num_events


async def measure_afollow(url: str, names: list[str], num_events: int) -> float:
    start = time.perf_counter()
    for name in names:
        check([event async for event in afollow(url, name, timeout=10)], num_events)
    return 1e6 * (time.perf_counter() - start) / len(names) / num_events


async def measure_hub(url: str, names: list[str], steps: int) -> float:
    """CPU time of the event loop's thread, in which the tokens are appended as well."""
    async with StreamHub(url) as hub:
        with StreamPublisher(url) as publisher:
            for name in names:
                publisher.open(name, 1, hub.reader_id)
            readers = [asyncio.create_task(collect(hub, name)) for name in names]
            await asyncio.to_thread(publisher.flush, 10)
            start = time.thread_time()
            for step in range(steps):
                for name in names:
                    publisher.append(name, (step,), (TEXT,))
                await asyncio.to_thread(publisher.flush, 10)
            for name in names:
                publisher.finish(name, StreamEnd("stop"))
            for events in await asyncio.gather(*readers):
                check(events, steps + 1)
            return 1e6 * (time.thread_time() - start) / len(names) / (steps + 1)


async def collect(hub: StreamHub, name: str) -> list[StreamEvent]:
    return [event async for event in hub.events(name, framed=True, timeout=10)]


def check(events: list[StreamEvent], num_events: int) -> None:
    numbers = [event.first + at for event in events for at in range(len(event.token_ids))]
    assert numbers == list(range(1, num_events))
    assert "".join(event.text for event in events) == TEXT * (num_events - 1)


def measure(url: str, streams: int, steps: int) -> dict[str, Any]:
    names = [f"req_{number:024x}" for number in range(streams)]
    plain = measure_plain(url, names, steps)
    publisher = measure_publisher(url, names, steps, "reader_nobody")
    reading = {
        "follow": measure_follow(url, names, steps + 1),
        "afollow": asyncio.run(measure_afollow(url, names, steps + 1)),
        "hub": asyncio.run(measure_hub(url, [f"{name}/1" for name in names], steps)),
    }
    ratio = publisher["ms_per_flush"]["median"] / plain["ms_per_flush"]["median"]
    ratios = {name: us / plain["read_us_per_event"]["median"] for name, us in reading.items()}
    print(f"a flush of {streams} tokens: {publisher['ms_per_flush']['median']:.2f} ms, {ratio:.2f} of plain PUBLISH")
    print(f"Python at the publisher: {publisher['python_us_per_token']['median']:.1f} µs a token")
    for name, us in reading.items():
        print(f"{name}: {us:.1f} µs an event, {ratios[name]:.2f} of a plain subscriber")
    return {
        "streams": streams,
        "steps": steps,
        "publisher": publisher,
        "read_us_per_event": reading,
        "plain": plain,
        "flush_ratio": ratio,
        "read_ratios": ratios,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, EmbeddedValkey(Path(folder)) as valkey:
        print_result("streams", measure(valkey.url, options.streams, options.steps))


if __name__ == "__main__":
    main()
