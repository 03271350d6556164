"""The hub: many streams at once, each as exact as if it were followed alone."""

import asyncio
import random
from collections.abc import Callable

import pytest
from redis import Redis

from headrace.jobs.streams.cursor import StreamTimeout
from headrace.jobs.streams.events import StreamEvent
from headrace.jobs.streams.follower import MAX_WAITING_EVENTS
from headrace.jobs.streams.hub import HubClosed, StreamHub
from headrace.jobs.streams.publisher import StreamPublisher

from .answers import answer_of, append, check, finish, write

NUM_STREAMS = 200


async def collect(hub: StreamHub, stream_id: str, after: int = 0, framed: bool = True) -> list[StreamEvent]:
    return [event async for event in hub.events(stream_id, after, framed=framed, timeout=60)]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("framed", [True, False])
@pytest.mark.parametrize("chaos", [False, True])
def test_two_hundred_streams(url: str, redis: Redis, publisher: StreamPublisher, framed: bool, chaos: bool) -> None:
    """In batches of any size; with chaos, connections are killed and Redis is emptied meanwhile."""
    answers = {f"req_{number}": answer_of(60, number) for number in range(NUM_STREAMS)}
    chance = random.Random(3)

    async def run() -> dict[str, list[StreamEvent]]:
        async with StreamHub(url) as hub:
            tasks = {name: asyncio.create_task(collect(hub, name, framed=framed)) for name in answers}
            written = dict.fromkeys(answers, 0)
            for name in answers:
                publisher.open(name, 1, hub.reader_id if framed else None)
            while written:
                for name, start in list(written.items()):
                    stop = min(60, start + chance.randrange(12))
                    append(publisher, name, answers[name], start, stop)
                    written[name] = stop
                    if stop == 60:
                        del written[name]
                        finish(publisher, name, answers[name])
                await asyncio.sleep(0)
                if chaos and chance.random() < 0.3:
                    redis.client_kill_filter(_type=chance.choice(("normal", "pubsub")), skipme=True)
                # Only writing shows that something is gone.
                if chaos and written and chance.random() < 0.1:
                    redis.flushall()
            return dict(zip(tasks, await asyncio.gather(*tasks.values()), strict=True))

    for name, events in asyncio.run(run()).items():
        check(events, answers[name])


def test_joining_late_and_together(url: str, publisher: StreamPublisher) -> None:
    answer = answer_of(40)
    write(publisher, "req_a", answer, batch=3)

    async def run() -> None:
        async with StreamHub(url) as hub:
            for framed in (True, False):
                readers = [collect(hub, "req_a", after, framed) for after in (0, 17, 40, 17)]
                for after, events in zip((0, 17, 40, 17), await asyncio.gather(*readers), strict=True):
                    check(events, answer, after)
            assert [event.last async for event in hub.events("req_a", 99, timeout=30)] == [40]

    asyncio.run(run())


@pytest.mark.parametrize("is_cut", [False, True])
def test_an_expected_stream_is_not_read_unless_frames_were_lost(url: str, publisher: StreamPublisher, is_cut) -> None:
    answer = answer_of(40)

    async def run() -> int:
        async with StreamHub(url) as hub:
            with Redis.from_url(url) as redis:
                # What is expected before it listens it forgets as it begins to: Redis knows of it sooner.
                hub.expect("early")
                await until(lambda: not hub._expected)
                hub.expect("req_a")
                publisher.open("req_a", 1, hub.reader_id)
                append(publisher, "req_a", answer, 0, 20)
                await until(lambda: bool(hub._expected["req_a"]))
                if is_cut:
                    redis.client_kill_filter(_type="pubsub")
                    await until(lambda: not hub._expected)
                reader = asyncio.create_task(collect(hub, "req_a"))
                append(publisher, "req_a", answer, 20, 40)
                finish(publisher, "req_a", answer)
                check(await reader, answer)
                assert not hub._expected
                hub.expect("req_b")
                hub.forget("req_b")
                assert not hub._expected
                return int(redis.info("commandstats").get("cmdstat_xread", {}).get("calls", 0))

    with Redis.from_url(url) as redis:
        redis.config_resetstat()
    assert bool(asyncio.run(run())) is is_cut


def test_a_slow_consumer_beside_fast_ones(url: str, publisher: StreamPublisher) -> None:
    """It takes one event, then nothing until the others have everything: what it lacks does not wait in memory."""
    answer = answer_of(1500)

    async def run() -> None:
        async with StreamHub(url) as hub:
            publisher.open("req_a", 1, hub.reader_id)
            slow = hub.events("req_a", framed=True, timeout=60)
            fast = [asyncio.create_task(collect(hub, "req_a")) for _ in range(3)]
            append(publisher, "req_a", answer, 0, 1)
            events = [await anext(slow)]
            most = 0
            for start in range(1, 1500):
                append(publisher, "req_a", answer, start, start + 1)
                if start % 10 == 0:
                    assert await asyncio.to_thread(publisher.flush, 30)
                    most = max(most, hub.num_waiting_events)
            finish(publisher, "req_a", answer)
            for taken in await asyncio.gather(*fast):
                check(taken, answer)
            assert hub.num_waiting_events <= MAX_WAITING_EVENTS
            assert most <= 4 * MAX_WAITING_EVENTS
            check([*events, *[event async for event in slow]], answer)

    asyncio.run(run())


def test_one_reader_s_frames_only(url: str, publisher: StreamPublisher) -> None:
    """A stream that was addressed to another hub is followed by its channel; one that says otherwise is only late."""
    answer = answer_of(30)

    async def run() -> None:
        async with StreamHub(url) as hub, StreamHub(url) as other:
            tasks = [asyncio.create_task(collect(one, "req_a", framed=one is hub)) for one in (hub, other)]
            await asyncio.to_thread(write, publisher, "req_a", answer, 1, hub.reader_id)
            for events in await asyncio.gather(*tasks):
                check(events, answer)

    asyncio.run(run())


def test_consumers_that_go_leave_nothing_behind(url: str, redis: Redis, publisher: StreamPublisher) -> None:
    async def run() -> None:
        async with StreamHub(url) as hub:
            tasks = [asyncio.create_task(collect(hub, f"req_{k % 5}", framed=False)) for k in range(10)]
            await until(lambda: len(redis.pubsub_channels("headrace:stream:*")) == 5)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await until(lambda: not redis.pubsub_channels("headrace:stream:*"))
            with pytest.raises(StreamTimeout):
                await anext(hub.events("req_a", timeout=0.05))

    asyncio.run(run())


def test_a_hub_that_closes(url: str) -> None:
    async def run() -> None:
        async with StreamHub(url) as hub:
            task = asyncio.create_task(collect(hub, "req_a"))
            await until(lambda: bool(hub._followers))
        with pytest.raises(HubClosed):
            await task

    asyncio.run(run())
