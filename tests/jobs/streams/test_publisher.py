"""What the publisher brings to Redis: of one attempt, exactly once, whatever becomes of Redis."""

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from redis import Redis

from headrace.jobs.embedded.valkey import EmbeddedValkey
from headrace.jobs.streams.events import StreamEnd, StreamError, StreamEvent
from headrace.jobs.streams.keys import frames_channel, row_stream_id, stream_channel, stream_key, writer_key
from headrace.jobs.streams.publisher import StreamPublisher
from headrace.jobs.streams.reader import follow

from ..full_disk import full_disk
from .answers import answer_of, append, check, finish, write
from .test_reader import collect, in_threads


def test_what_stands_in_redis(redis: Redis, publisher: StreamPublisher) -> None:
    """docs/streams.md, to the letter."""
    with redis.pubsub() as told:
        told.subscribe(stream_channel("job_a/17"), frames_channel("reader_a"))
        publisher.open(row_stream_id("job_a", 17), 2, "reader_a")
        publisher.append("job_a/17", [11, 12], ["Hé", ""], [[-1.5], None])
        assert publisher.flush(30)
        publisher.finish("job_a/17", StreamEnd("error", '"', error=StreamError("lost", 'no "GPU"')))
        assert publisher.flush(30)
        entries = redis.xrange(stream_key("job_a/17"))
        assert [told.get_message(timeout=30)["data"] for _ in range(6)][2:] == [
            "2-0",
            '[["job_a/17","2-0",{"first":1,"tokens":[11,12],"texts":["H\\u00e9",""],"logprobs":[[-1.5],null]}]]',
            "2-1",
            '[["job_a/17","2-1",{"finish_reason":"error","text":"\\"","error":'
            '{"code": "lost", "message": "no \\"GPU\\""}}]]',
        ]
    assert entries == [
        ("2-0", {"first": "1", "tokens": "[11,12]", "texts": '["H\\u00e9",""]', "logprobs": "[[-1.5],null]"}),
        ("2-1", {"finish_reason": "error", "text": '"', "error": '{"code": "lost", "message": "no \\"GPU\\""}'}),
    ]
    assert redis.get(writer_key("job_a/17")) == "2"
    assert all(30 < redis.ttl(key) <= 60 for key in redis.scan_iter())


def test_what_is_said_of_the_prompt_stands_in_the_first_entry(
    url: str, redis: Redis, publisher: StreamPublisher
) -> None:
    with redis.pubsub() as told:
        told.subscribe(frames_channel("reader_a"))
        publisher.open("req_a", 1, "reader_a")
        publisher.append("req_a", [5], ["x"], None, [None, -1.5])
        assert publisher.flush(30)
        stored = {"first": "1", "tokens": "[5]", "texts": '["x"]', "prompt_logprobs": "[null,-1.5]"}
        assert redis.xrange(stream_key("req_a")) == [("1-0", stored)]
        _, frame = (told.get_message(timeout=30)["data"] for _ in range(2))
        ((_, entry_id, of_frame),) = json.loads(frame)
        assert StreamEvent.from_frame(entry_id, of_frame).prompt_logprobs == (None, -1.5)
    with StreamPublisher(url, 60) as other:
        recovered = other.recover({"req_a": 2})["req_a"]
        assert recovered.prompt_logprobs == (None, -1.5)
        other.open("req_a", 2, recovered=recovered)
        redis.delete(stream_key("req_a"))
        other.append("req_a", [6], ["y"])
        other.finish("req_a", StreamEnd("stop"))
        assert other.flush(30)
    events = list(follow(url, "req_a", timeout=30))
    assert [token for event in events for token in event.token_ids] == [5, 6]
    assert [event.prompt_logprobs for event in events] == [(None, -1.5), *[None] * (len(events) - 1)]


def test_what_came_during_a_flush_is_one_entry(url: str, redis: Redis, publisher: StreamPublisher) -> None:
    answer = answer_of(1000)
    publisher.open("req_a", 1)
    # Whatever is to be written waits, the first tokens with it.
    redis.client_pause(60_000, all=False)
    for start in range(1000):
        append(publisher, "req_a", answer, start, start + 1)
    finish(publisher, "req_a", answer)
    redis.client_unpause()
    assert publisher.flush(30)
    assert redis.xlen(stream_key("req_a")) < 10
    check(follow(url, "req_a", timeout=30), answer)


@pytest.mark.parametrize("knows", [True, False])
def test_the_next_attempt_goes_on(url: str, publisher: StreamPublisher, knows: bool) -> None:
    """Told what is there it goes on after that; otherwise it begins anew and what is there is left out by number."""
    answer = answer_of(50)
    readers, results = in_threads(lambda: list(follow(url, "req_a", timeout=60)), 1)
    publisher.open("req_a", 1)
    append(publisher, "req_a", answer, 0, 20)
    assert publisher.flush(30)
    with StreamPublisher(url, 60) as other:
        recovered = other.recover({"req_a": 2})["req_a"]
        assert (recovered.token_ids, recovered.texts, recovered.end) == (answer.token_ids[:20], answer.texts[:20], None)
        other.open("req_a", 2, recovered=recovered if knows else None)
        for start in range(20 if knows else 0, 50, 3):
            append(other, "req_a", answer, start, start + 3)
            assert other.flush(30)
        finish(other, "req_a", answer)
        assert other.flush(30)
        assert other.recover({"req_a": 3})["req_a"].end.finish_reason == "stop"
    readers[0].join()
    check(results[0], answer)
    check(follow(url, "req_a", timeout=30), answer)


def test_an_attempt_that_comes_back_is_refused(url: str, publisher: StreamPublisher) -> None:
    answer, other_answer = answer_of(30), answer_of(30, seed=1)
    publisher.open("req_a", 1)
    append(publisher, "req_a", other_answer, 0, 0)
    with StreamPublisher(url, 60) as other:
        other.open("req_a", 2)
        append(other, "req_a", answer, 0, 10)
        assert other.flush(30)
        append(publisher, "req_a", other_answer, 0, 30)
        finish(publisher, "req_a", other_answer)
        assert publisher.flush(30)
        assert publisher.recover({"req_a": 1, "req_b": 1}).keys() == {"req_b"}
        append(other, "req_a", answer, 10, 30)
        finish(other, "req_a", answer)
        assert other.flush(30)
    check(follow(url, "req_a", timeout=30), answer)


def test_an_earlier_attempt_here_ends_no_later_one(url: str, publisher: StreamPublisher) -> None:
    """A worker that was starved has taken a row again, and its first attempt only now hears that somebody watches."""
    stream_id = row_stream_id("job_a", 17)
    publisher.open(stream_id, 2)
    publisher.append(stream_id, [11], ["a"], attempt=2)
    assert publisher.flush(30)
    publisher.open(stream_id, 1)
    publisher.append(stream_id, [99], ["z"], attempt=1)
    publisher.finish(stream_id, StreamEnd("stop"), attempt=1)
    assert publisher.flush(30)
    publisher.append(stream_id, [12], ["b"], attempt=2)
    publisher.finish(stream_id, StreamEnd("stop"), attempt=2)
    assert [token for event in follow(url, stream_id, timeout=30) for token in event.token_ids] == [11, 12]


def test_recovering_shuts_the_earlier_attempt_out_at_once(url: str, publisher: StreamPublisher) -> None:
    answer = answer_of(10)
    publisher.open("req_a", 1)
    append(publisher, "req_a", answer, 0, 4)
    assert publisher.flush(30)
    recovered = publisher.recover({"req_a": 2})["req_a"]
    append(publisher, "req_a", answer, 4, 10)
    finish(publisher, "req_a", answer)
    assert publisher.flush(30)
    assert publisher.recover({"req_a": 2})["req_a"] == recovered
    assert recovered.last == 4


def test_redis_emptied_in_mid_stream(url: str, redis: Redis, publisher: StreamPublisher) -> None:
    answer = answer_of(200)
    readers, results = in_threads(lambda: list(follow(url, "req_a", timeout=60)), 2)
    publisher.open("req_a", 1)
    for start in range(0, 200, 10):
        append(publisher, "req_a", answer, start, start + 10)
        assert publisher.flush(30)
        if start % 60 == 0:
            redis.flushall()
    redis.flushall()
    finish(publisher, "req_a", answer)
    assert publisher.flush(30)
    for reader in readers:
        reader.join()
    for events in (*results, list(follow(url, "req_a", timeout=30))):
        check(events, answer)


def test_a_stream_that_ended_just_now_is_written_again_too(url: str, redis: Redis, publisher: StreamPublisher) -> None:
    answer = answer_of(20)
    write(publisher, "req_a", answer, batch=4)
    assert publisher.flush(30)
    redis.flushall()
    publisher.open("req_b", 1)
    # The loss is noticed when the connection breaks.
    redis.client_kill_filter(_type="normal", skipme=True)
    append(publisher, "req_b", answer, 0, 1)
    assert publisher.flush(30)
    check(follow(url, "req_a", timeout=30), answer)


def test_redis_killed_in_mid_stream(tmp_path: Path, wait_until: Callable[..., None]) -> None:
    """The last second is lost with it, the publisher writes it again; tokens that come meanwhile wait."""
    answer = answer_of(90)
    with EmbeddedValkey(tmp_path) as valkey, StreamPublisher(valkey.url, 60) as publisher:
        readers, results = in_threads(lambda: list(follow(valkey.url, "req_a", timeout=30)), 1)
        others, other_results = in_threads(lambda: asyncio.run(collect(valkey.url, "req_a", timeout=30)), 1)
        publisher.open("req_a", 1)
        for start in range(0, 90, 30):
            append(publisher, "req_a", answer, start, start + 15)
            assert publisher.flush(60)
            server = psutil.Process(Redis.from_url(valkey.url).info("server")["process_id"])
            server.kill()
            append(publisher, "req_a", answer, start + 15, start + 30)
        finish(publisher, "req_a", answer)
        assert publisher.flush(60)
        for thread in readers + others:
            thread.join()
        check(results[0], answer)
        check(other_results[0], answer)
        with Redis.from_url(valkey.url) as redis:
            assert all(redis.ttl(key) > 0 for key in redis.scan_iter())


def test_redis_away(tmp_path: Path) -> None:
    """Nothing blocks or raises; closing gives up after the time it was given."""
    with StreamPublisher(f"unix://{tmp_path}/nobody.sock", 60) as publisher:
        write_nothing = answer_of(1000)
        publisher.open("req_a", 1)
        append(publisher, "req_a", write_nothing, 0, 1000)
        assert not publisher.flush(0.05)
        publisher.close(0.05)


def test_where_no_file_can_be_opened_streams_wait(url: str) -> None:
    """Before it connects for the first time redis-py reads a file that says its version."""
    code = """
import importlib.metadata, logging, resource, sys, threading
from headrace.jobs.streams.events import StreamEnd
from headrace.jobs.streams.publisher import StreamPublisher

tried = threading.Event()
class Handler(logging.Handler):
    def emit(self, record):
        tried.set()
logging.getLogger().addHandler(Handler())
# An error that nobody catches ends the thread.
threading.excepthook = lambda ended: tried.set()
# As Celery has done in a worker: where the file is, is known by then.
importlib.metadata.version("redis")
limits = resource.getrlimit(resource.RLIMIT_NOFILE)
with StreamPublisher(sys.argv[1], 60) as publisher:
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    publisher.open("req_a", 1)
    publisher.append("req_a", [1], ["a"])
    publisher.finish("req_a", StreamEnd("stop"))
    assert tried.wait(60)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert publisher.flush(30)
"""
    subprocess.run([sys.executable, "-c", code, url], check=True)
    *_, end = follow(url, "req_a", timeout=30)
    assert (end.last, end.finish_reason) == (1, "stop")


def test_what_waits_is_bounded(
    tmp_path: Path, wait_until: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    """A row's stream is forgotten, a request's ends; one that waits with little is written whole."""
    answer = answer_of(500)
    big, new, small, row = "req_big", "req_new", "req_small", "job_a/1"
    with EmbeddedValkey(tmp_path) as valkey, StreamPublisher(valkey.url, 60, max_waiting_bytes=2000) as publisher:
        for stream_id in (row, big, small):
            publisher.open(stream_id, 1)
            append(publisher, stream_id, answer, 0, 10)
        assert publisher.flush(30)
        with full_disk(tmp_path, wait_until):
            append(publisher, small, answer, 10, 20)
            publisher.open(new, 1)
            for num_given_up, stream_id in enumerate((row, big, new)):
                append(publisher, stream_id, answer, 10, 500)
                wait_until(lambda known=num_given_up: caplog.text.count("given up") > known, f"{stream_id} is given up")
        for stream_id in (row, big, new, small):
            append(publisher, stream_id, answer, 20, 500)
            finish(publisher, stream_id, answer)
        assert publisher.flush(30)
        check(follow(valkey.url, small, timeout=30), answer)
        for stream_id, num_tokens in ((big, 10), (new, 0)):
            *tokens, end = follow(valkey.url, stream_id, timeout=30)
            assert sum(len(event.token_ids) for event in tokens) == end.last == num_tokens
            assert (end.finish_reason, end.error.code) == ("error", "stream_lost")
        with Redis.from_url(valkey.url, decode_responses=True) as redis:
            ((newest, _),) = redis.xrevrange(stream_key(row), count=1)
            assert newest == "10-0"


def test_released_streams_are_left_to_the_next_attempt(url: str, redis: Redis, publisher: StreamPublisher) -> None:
    answer = answer_of(8)
    publisher.open("req_a", 1)
    append(publisher, "req_a", answer, 0, 3)
    publisher.release("req_a")
    append(publisher, "req_a", answer, 3, 8)
    assert publisher.flush(30)
    append(publisher, "req_a", answer, 3, 8)
    assert publisher.flush(30)
    assert publisher.recover({"req_a": 2})["req_a"].last == 3


def test_one_bad_stream_harms_no_other(url: str, redis: Redis, publisher: StreamPublisher) -> None:
    answer = answer_of(8)
    redis.set(stream_key("req_a"), "something else", ex=60)
    for stream_id in ("req_a", "req_b", "req_c"):
        publisher.open(stream_id, 1)
    publisher.append("req_a", [1], ["a"])
    publisher.append("req_b", [1], ["a"], [object()])
    append(publisher, "req_c", answer, 0, 8)
    finish(publisher, "req_c", answer)
    assert publisher.flush(30)
    check(follow(url, "req_c", timeout=30), answer)


def test_long_waits_are_written_in_several_calls(url: str, redis: Redis, publisher: StreamPublisher) -> None:
    answer, gate = answer_of(400), threading.Barrier(4)
    redis.config_resetstat()

    def write_all(number: int) -> None:
        gate.wait()
        for stream_id in (f"req_{number}_{k}" for k in range(100)):
            publisher.open(stream_id, 1)
            append(publisher, stream_id, answer, 0, 400)
            finish(publisher, stream_id, answer)

    writers = [threading.Thread(target=write_all, args=(number,)) for number in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert publisher.flush(60)
    assert redis.info("commandstats")["cmdstat_evalsha"]["calls"] >= 2
    check(follow(url, "req_3_99", timeout=30), answer)
    assert redis.dbsize() == 800
