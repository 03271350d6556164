"""Readers of one stream get each token once: late ones, slow ones, and those that are cut off again and again."""

import asyncio
import random
import threading
from collections.abc import Callable, Iterator
from itertools import islice
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis import Redis
from redis.exceptions import ResponseError

from headrace.jobs.streams import cursor
from headrace.jobs.streams.events import StreamEnd, StreamEvent
from headrace.jobs.streams.keys import StreamIdError, new_reader_id, stream_key
from headrace.jobs.streams.publisher import StreamPublisher
from headrace.jobs.streams.reader import StreamTimeout, afollow, follow

from .answers import Answer, answer_of, append, check, finish, write


async def collect(url: str, stream_id: str, after: int = 0, timeout: float | None = 30) -> list[StreamEvent]:
    return [event async for event in afollow(url, stream_id, after, timeout)]


def in_threads(
    read: Callable[[], list[StreamEvent]], number: int
) -> "tuple[list[threading.Thread], list[list[StreamEvent]]]":
    results: list[list[StreamEvent]] = []
    threads = [threading.Thread(target=lambda: results.append(read())) for _ in range(number)]
    for thread in threads:
        thread.start()
    return threads, results


def test_readers_before_during_and_after(url: str, publisher: StreamPublisher) -> None:
    answer = answer_of(300)
    readers, results = in_threads(lambda: list(follow(url, "req_a", timeout=30)), 2)
    publisher.open("req_a", 1)
    append(publisher, "req_a", answer, 0, 150)
    assert publisher.flush(30)
    late, late_results = in_threads(lambda: list(follow(url, "req_a", timeout=30)), 2)
    for start in range(150, 300):
        append(publisher, "req_a", answer, start, start + 1)
    finish(publisher, "req_a", answer)
    for thread in readers + late:
        thread.join()
    assert publisher.flush(30)
    for events in (*results, *late_results, list(follow(url, "req_a", timeout=30)), asyncio.run(collect(url, "req_a"))):
        check(events, answer)


@pytest.mark.parametrize("after", [0, 1, 149, 150, 151, 299, 300])
def test_resuming_at_any_token(url: str, publisher: StreamPublisher, after: int) -> None:
    answer = answer_of(300)
    write(publisher, "req_a", answer, batch=50)
    check(follow(url, "req_a", after, 30), answer, after)
    check(asyncio.run(collect(url, "req_a", after)), answer, after)


def test_a_reader_that_claims_too_much_gets_the_end(url: str, publisher: StreamPublisher) -> None:
    write(publisher, "req_a", answer_of(5), batch=5)
    with Redis.from_url(url, socket_timeout=0.2) as client:
        assert [(event.finish_reason, event.last) for event in follow(client, "req_a", 9, 30)] == [("stop", 5)]


def test_cut_fifty_times(url: str, publisher: StreamPublisher) -> None:
    answer, chance = answer_of(2000), random.Random(1)
    writing = threading.Thread(target=write, args=(publisher, "req_a", answer, 7))
    writing.start()
    events: list[StreamEvent] = []
    for _ in range(50):
        stream = follow(url, "req_a", events[-1].last if events else 0, 30)
        events += islice(stream, chance.randrange(1, 4))
        stream.close()
    events += follow(url, "req_a", events[-1].last, 30)
    writing.join()
    check(events, answer)


def test_connections_killed(url: str, redis: Redis, publisher: StreamPublisher) -> None:
    """The publisher's and the readers', again and again."""
    answer = answer_of(400)
    readers, results = in_threads(lambda: list(follow(url, "req_a", timeout=60)), 2)
    others, other_results = in_threads(lambda: asyncio.run(collect(url, "req_a", timeout=60)), 1)
    publisher.open("req_a", 1)
    for start in range(0, 400, 20):
        append(publisher, "req_a", answer, start, start + 20)
        redis.client_kill_filter(_type="normal", skipme=True)
    finish(publisher, "req_a", answer)
    for thread in readers + others:
        thread.join()
    assert len(results + other_results) == 3
    for events in results + other_results:
        check(events, answer)


def test_a_slow_reader(url: str, publisher: StreamPublisher) -> None:
    """It takes its next token only when the writer has written several more, and the last ones when all is over."""
    answer, gate = answer_of(300), threading.Semaphore(0)

    def read_slowly() -> Iterator[StreamEvent]:
        for event in follow(url, "req_a", timeout=60):
            gate.acquire()
            yield event

    readers, results = in_threads(lambda: list(read_slowly()), 1)
    publisher.open("req_a", 1)
    for start in range(300):
        append(publisher, "req_a", answer, start, start + 1)
        assert publisher.flush(30)
        if start % 5 == 0:
            gate.release()
    finish(publisher, "req_a", answer)
    gate.release(1000)
    readers[0].join()
    check(results[0], answer)


def test_a_taker_s_own_time_does_not_count(
    url: str, publisher: StreamPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, now = answer_of(4), 0.0
    monkeypatch.setattr(cursor, "time", SimpleNamespace(monotonic=lambda: now))
    stream = follow(url, "req_a", timeout=0.4)
    publisher.open("req_a", 1)
    append(publisher, "req_a", answer, 0, 2)
    assert publisher.flush(30)
    events = [next(stream)]
    now += 0.5
    append(publisher, "req_a", answer, 2, 4)
    finish(publisher, "req_a", answer)
    assert publisher.flush(30)
    check([*events, *stream], answer)


def test_clients_of_any_kind(url: str, publisher: StreamPublisher) -> None:
    answer = answer_of(20)
    write(publisher, "req_a", answer, batch=3)
    for options in ({"protocol": 2}, {"protocol": 3}, {"protocol": 3, "decode_responses": True}):
        with Redis.from_url(url, **options) as client:
            check(follow(client, "req_a", timeout=30), answer)


def test_logprobs(url: str, publisher: StreamPublisher) -> None:
    of_tokens = [{"logprob": -0.5 * token, "top": [["a", -1.25]]} for token in range(6)]
    publisher.open("req_a", 1)
    for start in (0, 4):
        part = slice(start, start + 4)
        publisher.append("req_a", range(6)[part], "abcdef"[part], of_tokens[part])
        assert publisher.flush(30)
    publisher.finish("req_a", StreamEnd("length"))
    events = list(follow(url, "req_a", 2, 30))
    assert [logprobs for event in events[:-1] for logprobs in event.logprobs] == of_tokens[2:]
    assert publisher.recover({"req_a": 2})["req_a"].logprobs == tuple(of_tokens)


def test_nothing_new_in_time(url: str, publisher: StreamPublisher, tmp_path: object) -> None:
    with pytest.raises(StreamTimeout, match=r"req_a after token 0 for 0\.05 s"):
        list(follow(url, "req_a", timeout=0.05))
    with pytest.raises(StreamTimeout):
        asyncio.run(collect(url, "req_a", timeout=0.05))
    with pytest.raises(StreamTimeout):
        list(follow(f"unix://{tmp_path}/nobody.sock", "req_a", timeout=0.05))


def test_what_will_never_work_is_said_at_once(url: str, redis: Redis) -> None:
    redis.set(stream_key("req_a"), "something else", ex=60)
    with pytest.raises(ResponseError, match="WRONGTYPE"):
        list(follow(url, "req_a"))
    for stream_id in ("", 'req_"', "req a", "req_a/b", "req_\n"):
        with pytest.raises(StreamIdError):
            list(follow(url, stream_id))
    assert new_reader_id() != new_reader_id()


CUTS = st.lists(st.integers(1, 9), min_size=1, max_size=12)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(batches=CUTS, resumes=st.lists(st.integers(0, 60), max_size=5), seed=st.integers(0, 9))
def test_any_cuts(
    url: str, redis: Redis, publisher: StreamPublisher, batches: list[int], resumes: list[int], seed: int
) -> None:
    redis.flushall()
    stream_id, answer = f"req_{seed}", answer_of(sum(batches), seed)
    publisher.open(stream_id, 1)
    start = 0
    for size in batches:
        append(publisher, stream_id, answer, start, start + size)
        start += size
        if size % 2:
            assert publisher.flush(30)
    finish(publisher, stream_id, answer)
    for after in (0, *(min(number, start) for number in resumes)):
        check(follow(url, stream_id, after, 30), answer, after)


def test_events_are_cut_by_number() -> None:
    answer = Answer((5, 6, 7), ("a", "", "c"), "")
    event = StreamEvent(4, answer.token_ids, answer.texts, None, None, "ac")
    assert event.after(0) is event.after(3) is event
    assert event.after(4) == StreamEvent(5, (6, 7), ("", "c"), None, None, "c")
    assert event.after(6) is None
    assert event.after(9) is None
