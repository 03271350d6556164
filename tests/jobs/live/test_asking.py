"""What a reader is told of an answer that has ended and is not there any more."""

import asyncio
from collections.abc import Callable, Iterator

import pytest
from redis import Redis

from headrace.jobs.live.asking import GenerationError, LiveStreams
from headrace.jobs.live.keys import request_key
from headrace.jobs.live.requests import LiveRequest, LiveState, UnknownRequest
from headrace.jobs.streams.events import StreamEvent
from headrace.jobs.streams.keys import stream_key

from .desk import Desk


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


def test_a_request_that_is_forgotten_too_is_unknown(streams, redis, ended):
    request = ended()
    redis.delete(stream_key(request.id), request_key(request.id))
    with pytest.raises(UnknownRequest):
        list(streams.follow(request.id))
