"""The worker's side of watched rows, with an engine that does a step for each permit."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from threading import Thread

import pytest
from redis import Redis

from headrace.jobs.broker.redis_access import redis_server
from headrace.jobs.errors import Stopped
from headrace.jobs.settings import Settings
from headrace.jobs.shards.attempt import AttemptTools, ShardAttempt
from headrace.jobs.shards.row_streams import RowStreams
from headrace.jobs.streams import row_watch
from headrace.jobs.streams.events import StreamEvent
from headrace.jobs.streams.keys import row_stream_id, watch_key
from headrace.jobs.streams.publisher import StreamPublisher
from headrace.jobs.streams.reader import follow
from headrace.jobs.streams.row_watch import RowWatch
from headrace.storage.errors import LeaseLost
from headrace.storage.rows.spool import PlannedRow

from ..running import environment
from ..shop import JOB, OVER, Shop
from .commands import commands_of


@pytest.fixture
def redis_url(tmp_path: Path) -> Iterator[str]:
    with redis_server(Settings.from_environment(environment(tmp_path / "valkey"))) as server:
        yield server.url


@pytest.fixture
def watch(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[RowWatch]:
    """Who is said to watch does so however long the test takes."""
    monkeypatch.setattr(row_watch, "TTL_SECONDS", 600.0)
    with RowWatch(redis_url) as watch:
        yield watch


@pytest.fixture
def streams(shop: Shop, redis_url: str, watch: RowWatch) -> Iterator[RowStreams]:
    with (
        StreamPublisher(redis_url) as publisher,
        RowStreams(shop.host, shop.tools.tokenizer, publisher, watch) as streams,
    ):
        yield streams


def tools(shop: Shop, streams: RowStreams) -> AttemptTools:
    return replace(shop.tools, row_streams=streams)


def read(redis_url: str, row: int) -> list[StreamEvent]:
    return list(follow(redis_url, row_stream_id(JOB, row), timeout=60))


def rows(count: int) -> list[PlannedRow]:
    return [PlannedRow(row, str(row), {}, [3 + row, 5], None) for row in range(count)]


def test_a_reader_that_joins_in_the_middle_gets_the_whole_row(
    shop: Shop, streams: RowStreams, watch: RowWatch, redis_url: str
) -> None:
    shop.create(rows(3), sampling={"ignore_eos": True, "max_tokens": 8})
    attempt = shop.attempt(tools=tools(shop, streams))
    with running(shop, attempt):
        # Rows are computed one after the other: three tokens of the first are there.
        shop.runner.permit(3)
        for _ in range(4):
            shop.runner.wait_until_reached()
        watch.watch(JOB, 0)
        watch.watch(JOB, 2)
        streams.look()
    for row in (0, 2):
        events = read(redis_url, row)
        assert [token for event in events for token in event.token_ids] == shop.answer(row)
        assert "".join(event.text for event in events) == shop.text(row)
        assert events[-1].usage is not None
        assert events[-1].usage.completion_tokens == len(shop.answer(row))
    shop.assert_complete()
    with Redis.from_url(redis_url) as redis:
        assert not redis.exists(f"headrace:stream:{row_stream_id(JOB, 1)}")
        assert all(redis.pttl(key) > 0 for key in redis.keys("headrace:*"))


def test_rows_that_nobody_watches_ask_nothing_of_redis(shop: Shop, streams: RowStreams, redis_url: str) -> None:
    shop.create(rows(2))
    with Redis.from_url(redis_url) as redis:
        before = commands_of(redis)
        shop.attempt(tools=tools(shop, streams)).run()
        streams.look()
        assert commands_of(redis) == before
    shop.assert_complete()


def test_an_attempt_that_ends_leaves_the_stream_to_the_next(
    shop: Shop, streams: RowStreams, watch: RowWatch, redis_url: str, wait_until: Callable[..., None]
) -> None:
    shop.create(rows(1), sampling={"ignore_eos": True, "max_tokens": 8})
    watch.watch(JOB, 0)
    stream_id = row_stream_id(JOB, 0)
    first = shop.attempt(shop.claim(OVER), tools(shop, streams))
    with running(shop, first) as thread:
        wait_until(lambda: is_followed(streams), "the row is followed")
        shop.runner.permit(3)
        begun = follow(redis_url, stream_id, timeout=60)
        assert next(begun).first == 1
        first.stop()
        # Before the engine goes on: it might have the row's last token sooner than the attempt ends.
        thread.join(60)
    second = shop.attempt(tools=tools(shop, streams))
    with running(shop, second):
        wait_until(lambda: is_followed(streams), "the row is followed again")
    events = list(follow(redis_url, stream_id, timeout=60))
    assert [token for event in events for token in event.token_ids] == shop.answer(0)
    assert "".join(event.text for event in events) == shop.text(0)


def test_two_attempts_in_one_worker_write_a_row_once(
    shop: Shop, streams: RowStreams, watch: RowWatch, redis_url: str, wait_until: Callable[..., None]
) -> None:
    """It was starved for longer than its lease, and has taken its shard again while the first one goes on."""
    shop.create(rows(1), sampling={"ignore_eos": True, "max_tokens": 8})
    watch.watch(JOB, 0)
    first = shop.attempt(shop.claim(OVER), tools(shop, streams))
    with running(shop, first):
        wait_until(lambda: is_followed(streams), "the row is followed")
        shop.runner.permit(3)
        for _ in range(4):
            shop.runner.wait_until_reached()
        second = shop.attempt(tools=tools(shop, streams))
        with running(shop, second):
            wait_until(lambda: is_followed(streams, 2), "it is followed twice")
    assert [token for event in read(redis_url, 0) for token in event.token_ids] == shop.answer(0)
    shop.assert_complete()


class EndsMeanwhile(RowWatch):
    """While it is asked which rows are watched, an attempt ends."""

    attempt: ShardAttempt
    thread: Thread

    def watched(self, job_ids: Collection[str]) -> set[tuple[str, int]]:
        self.attempt.stop()
        self.thread.join(60)
        return super().watched(job_ids)


def test_no_stream_is_begun_for_an_attempt_that_has_ended_meanwhile(
    shop: Shop, streams: RowStreams, watch: RowWatch, redis_url: str, wait_until: Callable[..., None]
) -> None:
    shop.create(rows(1), sampling={"ignore_eos": True, "max_tokens": 8})
    watch.watch(JOB, 0)
    attempt = shop.attempt(tools=tools(shop, streams))
    with running(shop, attempt) as thread, EndsMeanwhile(redis_url) as ends_meanwhile:
        wait_until(lambda: bool(streams._offers), "the rows are offered")
        ends_meanwhile.attempt, ends_meanwhile.thread = attempt, thread
        streams.watch = ends_meanwhile
        streams.look()
    assert streams.publisher.flush(60)
    assert not streams.publisher._writer._streams


@contextmanager
def running(shop: Shop, attempt: ShardAttempt) -> Iterator[Thread]:
    """An attempt that is held up in the engine until the end of the context."""

    def run() -> None:
        with suppress(Stopped, LeaseLost):
            attempt.run()

    shop.runner.close()
    thread = Thread(target=run)
    thread.start()
    try:
        yield thread
    finally:
        shop.runner.open()
        thread.join(60)


def is_followed(streams: RowStreams, times: int = 1) -> bool:
    streams.look()
    return sum(bool(offer.samples) for offer in streams._offers) == times


def test_a_watch_ends_by_itself(watch: RowWatch, redis_url: str) -> None:
    watch.watch("job_a", 3)
    watch.watch("job_a", 5)
    watch.watch("job_b", 1)
    assert watch.watched({"job_a", "job_c"}) == {("job_a", 3), ("job_a", 5)}
    with Redis.from_url(redis_url) as redis:
        redis.zadd(watch_key("job_a"), {"3": 1.0})
    assert watch.watched({"job_a"}) == {("job_a", 5)}
    assert watch.watched(set()) == set()
