"""Long rows outlive their worker: the next attempt goes on after their last saved token, to the same answer."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from tokenizers import decoders

from headrace.engine.logprobs import Logprob
from headrace.jobs.broker.redis_access import redis_server
from headrace.jobs.errors import Stopped
from headrace.jobs.settings import Settings
from headrace.jobs.shards.attempt import AttemptTools, ShardAttempt
from headrace.jobs.shards.begun import Begun
from headrace.jobs.shards.checkpoints import TokenCheckpoints
from headrace.jobs.streams.keys import row_stream_id, tokens_key
from headrace.jobs.streams.publisher import StreamPublisher
from headrace.storage.ledger.records import JobState

from ..attempts import ask
from ..conftest import wait_until
from ..models import write_model_folder
from ..running import environment
from ..shop import JOB, OVER, SHARD, Shop
from .commands import commands_of

ROWS = ask((1, 2), (3, 5), (4, 5, 6))
LONG_ANSWERS = {"ignore_eos": True, "max_tokens": 12, "temperature": 1.0, "seed": 3}
FEW = 4
# With these, each a token, JSON can be spelled.
WORDS = ("<end>", "[", "]", ",", *"0123456")
DIGITS = {"type": "array", "items": {"enum": list(range(6))}, "minItems": 5, "maxItems": 10}


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    data_dir = tmp_path_factory.mktemp("valkey")
    with redis_server(Settings.from_environment(environment(data_dir))) as server:
        yield server.url


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("models") / "json", words=WORDS, decoder=decoders.ByteLevel())


@pytest.fixture
def redis(redis_url: str) -> Iterator[Redis]:
    with Redis.from_url(redis_url) as redis:
        redis.flushall()
        yield redis


@pytest.fixture
def checkpoints(shop: Shop, redis: Redis, redis_url: str) -> Iterator[TokenCheckpoints]:
    with TokenCheckpoints(redis_url, shop.host, ttl_seconds=600, min_tokens=FEW) as checkpoints:
        yield checkpoints


@pytest.fixture
def tools(shop: Shop, checkpoints: TokenCheckpoints) -> AttemptTools:
    return replace(shop.tools, checkpoints=checkpoints)


Start = Callable[..., "Future[Any]"]


def begin(shop: Shop, attempt: ShardAttempt, start: Start, num_steps: int) -> "Future[Any]":
    """Run an attempt for so many steps, of which each computes one token of one row."""
    shop.runner.close()
    running = start(attempt.run)
    shop.runner.permit(num_steps)
    for _ in range(num_steps + 1):
        shop.runner.wait_until_reached()
    return running


def end(shop: Shop, attempt: ShardAttempt, running: "Future[Any]") -> None:
    attempt.stop()
    with pytest.raises(Stopped):
        running.result(60)
    shop.runner.open()


def saved(redis: Redis) -> dict[str, int]:
    """How many tokens of each row Redis has."""
    return {
        name.decode(): len(tokens) // 4
        for name, tokens in redis.hgetall(tokens_key(SHARD)).items()
        if name != b"attempt"
    }


def outputs(shop: Shop, tools: AttemptTools) -> dict[str, Any]:
    """What the shard's next attempt makes of it, but for what depends on the prefix cache and on the attempt."""
    assert shop.attempt(tools=tools).run() is JobState.COMPLETED
    columns: dict[str, Any] = shop.table().drop_columns(["cached_tokens", "receipt"]).to_pydict()
    return columns


def test_after_a_kill_only_the_rest_is_computed(shop, tools, checkpoints, redis, start):
    shop.create(ROWS, sampling=LONG_ANSWERS)
    killed = shop.attempt(shop.claim(OVER), tools)
    running = begin(shop, killed, start, 12 + 7)
    wait_until(lambda: shop.num_committed() == 1, "the first row is committed")
    checkpoints.save()
    assert saved(redis) == {"1": 7}
    # Two more that nobody saves: it is not heard of again.
    shop.runner.permit(2)
    for _ in range(2):
        shop.runner.wait_until_reached()
    shop.ledger.messages.requeue_expired("q")
    second = shop.attempt(tools=tools)
    checkpoints.restore(second.claim, range(3))
    # Alive after all: it can write no more.
    end(shop, killed, running)
    assert saved(redis) == {"1": 7}
    second.run()
    shop.assert_complete()
    # Whichever step stood at the gate when it was dropped was computed in vain.
    assert shop.host.stats.num_steps <= 3 * 12 + 2 + 1
    assert not redis.keys("headrace:tokens:*")


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"n": 2, "max_tokens": 8},
        {"stop": "3", "presence_penalty": 1.0},
        {"min_tokens": 10, "ignore_eos": False},
        {"logprobs": True, "top_logprobs": 2},
        {"logprobs": True, "n": 2, "max_tokens": 8},
        {"ignore_eos": False, "structured_outputs": {"regex": "[0-6]{9,12}"}},
        {"ignore_eos": False, "structured_outputs": {"json": DIGITS}, "max_tokens": 40},
    ],
    ids=[
        "greedy",
        "two samples",
        "stop and penalty",
        "least tokens",
        "logprobs",
        "logprobs of two samples",
        "regex",
        "JSON schema",
    ],
)
def test_an_answer_is_that_of_an_undisturbed_run(shop, tools, redis, start, options):
    shop.create(ROWS, sampling=LONG_ANSWERS | options)
    first = shop.attempt(shop.claim(), tools)
    running = begin(shop, first, start, 6)
    end(shop, first, running)
    shop.ledger.leases.release(first.claim)
    assert saved(redis)
    assert tools.checkpoints.restore(replace(first.claim, attempt_number=2), range(3)).known
    before = shop.host.stats.num_steps
    resumed = outputs(shop, tools)
    num_resumed_steps = shop.host.stats.num_steps - before
    shop.ledger.delete_job(JOB)
    for path in shop.output.iterdir():
        path.unlink()
    shop.output.rmdir()
    shop.create(ROWS, sampling=LONG_ANSWERS | options)
    before = shop.host.stats.num_steps
    assert resumed == outputs(shop, shop.tools)
    # What the first attempt has computed the second has not.
    assert num_resumed_steps < shop.host.stats.num_steps - before


@pytest.mark.parametrize("choices", [("a", "b", "c d"), None], ids=["choices", "free"])
def test_thinking_goes_on_where_it_was_cut(shop, checkpoints, redis, start, tmp_path, choices):
    shop.model = write_model_folder(tmp_path / "thinker", words=("<end>", *"abcdefg", "<think>", "</think>", "j"))
    tools = replace(shop.tools, checkpoints=checkpoints)
    rows = ask((1, 2, 8), (3, 5, 8), (4, 5, 6, 8))
    spec = {"choices": choices, "sampling": {"max_tokens": 12, "temperature": 1.0, "seed": 8, "reasoning": True}}
    shop.create(rows, **spec)
    first = shop.attempt(shop.claim(), tools)
    running = begin(shop, first, start, 6)
    end(shop, first, running)
    shop.ledger.leases.release(first.claim)
    assert saved(redis)
    before = shop.host.stats.num_steps
    resumed = outputs(shop, tools)
    num_resumed_steps = shop.host.stats.num_steps - before
    assert all(resumed["reasoning_tokens"])
    shop.ledger.delete_job(JOB)
    for path in shop.output.iterdir():
        path.unlink()
    shop.output.rmdir()
    shop.create(rows, **spec)
    before = shop.host.stats.num_steps
    assert resumed == outputs(shop, shop.tools)
    assert num_resumed_steps < shop.host.stats.num_steps - before


def test_without_redis_or_its_content_a_row_begins_again(shop, tools, checkpoints, redis, start):
    shop.create(ROWS, sampling=LONG_ANSWERS)
    first = shop.attempt(shop.claim(), tools)
    running = begin(shop, first, start, 6)
    checkpoints.save()
    redis.flushall()
    shop.runner.permit(5)
    for _ in range(5):
        shop.runner.wait_until_reached()
    checkpoints.save()
    checkpoints.save()
    # Written again, as a whole.
    assert saved(redis) == {"0": 11}
    end(shop, first, running)
    shop.ledger.leases.release(first.claim)
    redis.flushall()
    with TokenCheckpoints("redis://127.0.0.1:1/0", shop.host, 600) as away:
        assert not away.restore(replace(first.claim, attempt_number=2), range(3)).known
    shop.attempt(tools=tools).run()
    shop.assert_complete()


def test_short_rows_ask_nothing_of_redis(shop, tools, checkpoints, redis):
    shop.create(ROWS, sampling={"max_tokens": FEW})
    before = commands_of(redis)
    shop.attempt(tools=tools).run()
    checkpoints.save()
    assert commands_of(redis) == before
    shop.assert_complete()


def test_a_row_that_was_watched_goes_on_after_what_its_readers_have(shop, tools, redis, redis_url):
    shop.create(ROWS, sampling=LONG_ANSWERS)
    claim = shop.claim()
    seen = shop.answer(1)[:5]
    with StreamPublisher(redis_url) as publisher:
        publisher.open(row_stream_id(JOB, 1), claim.attempt_id)
        publisher.append(row_stream_id(JOB, 1), seen, ["x"] * 5)
        assert publisher.flush(60)
    shop.ledger.leases.release(claim)
    shop.attempt(tools=tools).run()
    shop.assert_complete()
    assert shop.host.stats.num_steps == 3 * 12 - 5


@pytest.mark.parametrize("logprobs", [False, True])
def test_tokens_that_the_engine_refuses_are_left_aside(shop, tools, redis, logprobs):
    shop.create(ROWS, sampling=LONG_ANSWERS | {"logprobs": logprobs})
    claim = shop.claim()
    unknown = Begun((65535,) * 3, ({65535: Logprob(-1.0, 1)},) * 3).to_bytes(0 if logprobs else None)
    redis.hset(tokens_key(SHARD), mapping={"attempt": claim.attempt_id, "1#0" if logprobs else "1": unknown})
    shop.ledger.leases.release(claim)
    shop.attempt(tools=tools).run()
    shop.assert_complete()
    for row in shop.table().to_pylist() if logprobs else ():
        assert [entry["token_id"] for entry in row["logprobs"]] == shop.answer(row["row"])
