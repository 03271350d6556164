"""What a reader is told of an answer that is not there any more, or that cannot come."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from headrace.jobs.embedded.valkey import EmbeddedValkey
from headrace.jobs.live import asking
from headrace.jobs.live.asking import GenerationError, LiveStreams
from headrace.jobs.live.claims import LiveClaims
from headrace.jobs.live.keys import request_key
from headrace.jobs.live.requests import LiveRequest, LiveState, UnknownRequest
from headrace.jobs.streams.events import StreamEvent
from headrace.jobs.streams.keys import stream_key
from headrace.jobs.streams.reader import StreamTimeout, follow

from ..full_disk import full_disk
from .desk import Desk, claim_one, opened_desk


@pytest.fixture
def streams(desk: Desk) -> LiveStreams:
    return LiveStreams(desk.url, desk.requests)


@pytest.fixture
def redis(desk: Desk) -> Iterator[Redis]:
    with Redis.from_url(desk.url, decode_responses=True) as redis:
        yield redis


@pytest.fixture
def ended(desk: Desk, wait_until: Callable[..., None]) -> Callable[..., LiveRequest]:
    """A request that was answered, and of which Redis knows that."""

    def answer(**options: object) -> LiveRequest:
        request = desk.submitted(**options)
        with desk.worker() as worker:
            worker.live.ring(request.id)
            wait_until(lambda: desk.requests.get(request.id).state is LiveState.ENDED, "the request has ended")
        return request

    return answer


async def _collected(streams: LiveStreams, stream_id: str) -> list[StreamEvent]:
    return [event async for event in streams.afollow(stream_id)]


def test_an_answer_that_redis_has_lost_is_not_waited_for(desk, streams, redis, ended):
    request = ended(n=2)
    redis.delete(stream_key(request.stream_ids[1]))
    for read in (lambda: list(streams.follow(request.stream_ids[1])), lambda: streams.collect(request)):
        with pytest.raises(GenerationError, match="ask again") as lost:
            read()
        assert lost.value.code == "stream_lost"
    with pytest.raises(GenerationError) as lost:
        asyncio.run(_collected(streams, request.stream_ids[1]))
    assert lost.value.code == "stream_lost"
    # The other answer is there.
    assert list(streams.follow(request.id)) == desk.events(request.id)


def test_what_is_left_of_an_answer_without_its_end_comes_first(streams, redis, ended):
    request = ended()
    ((end, _),) = redis.xrevrange(stream_key(request.id), count=1)
    redis.xdel(stream_key(request.id), end)
    events = streams.follow(request.id)
    num_tokens = 0
    while num_tokens < int(end.partition("-")[0]):
        num_tokens += len(next(events).token_ids)
    with pytest.raises(GenerationError) as lost:
        next(events)
    assert lost.value.code == "stream_lost"


def test_a_redis_that_is_away_has_lost_nothing(desk, streams, ended, monkeypatch):
    """A request that has ended, and whose stream could not be read for a while."""
    request = ended()
    times = iter(range(3))

    def away_at_first(*args: Any, **options: Any) -> Iterator[StreamEvent]:
        if next(times, None) is not None:
            raise StreamTimeout("not reached", has_looked=False)
        return follow(*args, **options)

    monkeypatch.setattr(asking, "follow", away_at_first)
    assert list(streams.follow(request.id)) == desk.events(request.id)


def test_a_request_that_is_forgotten_too_is_unknown(streams, redis, ended):
    request = ended()
    redis.delete(stream_key(request.id), request_key(request.id))
    with pytest.raises(UnknownRequest):
        list(streams.follow(request.id))


def assert_given_up(read: Callable[[], object], code: str) -> None:
    with pytest.raises(GenerationError) as given_up:
        read()
    assert given_up.value.code == code


def test_nobody_waits_for_a_redis_that_takes_nothing_in(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, wait_until: Callable[..., None]
) -> None:
    """A request that came in just before the disk was full, and one whose worker cannot write its tokens."""
    monkeypatch.setattr(asking, "_PATIENCE_SECONDS", 0.05)
    monkeypatch.setattr(asking, "_LOOKS_PER_TRY", 2)
    with EmbeddedValkey(tmp_path) as valkey, opened_desk(valkey, model, "headrace.live.full") as desk:
        streams = LiveStreams(desk.url, desk.requests)
        with desk.worker() as worker:
            worker.runner.close()
            waiting, running = desk.submitted(), desk.submitted()
            worker.live.ring(running.id)
            worker.runner.wait_until_reached()
            with full_disk(tmp_path, wait_until):
                silence = asking._Silence(desk.requests, waiting.id)
                for _ in range(2):
                    # What is refused now and then, between tokens, is no reason to give up.
                    for _ in range(3):
                        silence.look(has_looked=True)
                    silence.end()
                worker.runner.open()
                assert_given_up(lambda: list(streams.follow(waiting.id)), "unavailable")
                assert_given_up(lambda: list(streams.follow(running.id)), "unavailable")
                assert_given_up(lambda: asyncio.run(_collected(streams, waiting.id)), "unavailable")
            # Whoever asks again once there is room finds the whole of it.
            desk.assert_streamed(running)
            worker.live.ring(waiting.id)
            desk.assert_streamed(waiting)


def test_past_its_deadline_nobody_waits_whatever_became_of_its_worker(
    desk: Desk, streams: LiveStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "_PATIENCE_SECONDS", 0.05)
    request = desk.submitted(timeout_seconds=-10.0)
    assert_given_up(lambda: list(streams.follow(request.id)), "deadline_exceeded")
    with LiveClaims(desk.url, desk.app, desk.queue, "killed", 600.0, 600.0) as claims:
        assert claim_one(claims, request.id) is not None
    assert_given_up(lambda: list(streams.follow(request.id)), "deadline_exceeded")
