"""Live requests whose answer cannot come: their clients hear why."""

import asyncio
import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import httpx2
import pytest
from redis import Redis

from headrace.jobs import rare_warnings
from headrace.jobs.api import live_answers
from headrace.jobs.broker.celery_app import shard_queue
from headrace.jobs.client.client import Client
from headrace.jobs.embedded.valkey import ValkeyPaths
from headrace.jobs.live import asking, cancellations
from headrace.jobs.live.asking import GenerationError
from headrace.jobs.live.cancellations import Cancellations
from headrace.jobs.live.keys import request_key
from headrace.jobs.live.requests import LiveRequest, LiveRequests, LiveState
from headrace.jobs.settings import Settings
from headrace.jobs.spec.precision import Precision
from headrace.jobs.spec.sampling import SamplingSpec
from headrace.jobs.streams.events import StreamEnd, StreamUsage
from headrace.jobs.streams.fetcher import Fetched, Fetcher
from headrace.jobs.streams.publisher import StreamPublisher
from headrace.jobs.workers.presence import WorkerId, WorkerPresence

from ..full_disk import full_disk
from ..running import MODEL, environment
from .in_process import InProcessServer, in_process_server
from .live_desk import LiveDesk, live_desk

BODY = {"model": MODEL.name, "messages": [{"role": "user", "content": "Where is my parcel?"}]}


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    with Client(Settings.from_environment(environment(tmp_path))) as client:
        yield client


@pytest.fixture
def server(client: Client, monkeypatch: pytest.MonkeyPatch) -> Iterator[InProcessServer]:
    monkeypatch.setattr(live_answers, "_CHECK_SECONDS", 0.05)
    monkeypatch.setattr(live_answers, "_LAST_SECONDS", 0.05)
    monkeypatch.setattr(live_answers, "_REFUSED_SECONDS", 0.05)
    with in_process_server(client) as server:
        yield server


@pytest.fixture
def desk(client: Client, tmp_path: Path, lasting_presence: None) -> Iterator[LiveDesk]:
    """Of a server that knows of a worker, which takes nothing."""
    with WorkerPresence(client.redis_url) as presence, live_desk(tmp_path) as desk:
        presence.announce(shard_queue(str(MODEL), Precision()), WorkerId("another-host", 7, "x"))
        yield desk


@pytest.fixture
def asked(server: InProcessServer, desk: LiveDesk, start: Callable[..., "Future[Any]"]) -> "Callable[[], Future[Any]]":
    """Asks, without waiting for the answer."""
    return lambda: start(httpx2.post, f"{server.url}/v1/chat/completions", json=BODY, timeout=60)


def test_a_disk_that_fills_after_a_request_was_taken(
    asked: "Callable[[], Future[Any]]",
    desk: LiveDesk,
    tmp_path: Path,
    wait_until: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rare_warnings, "_REPEAT_SECONDS", 3600.0)
    answer = asked()
    wait_until(lambda: desk.open_ids() or answer.done(), "the request is taken")
    assert not answer.done()
    (request_id,) = desk.open_ids()
    with full_disk(tmp_path, wait_until):
        refused = answer.result(60)
        assert not desk.get(request_id).is_cancelled
    wait_until(lambda: desk.get(request_id).is_cancelled, "what the client will ask again is called off")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
    assert refused.headers["Retry-After"] == "5"
    for said in ("wait for nothing any more", "not called off yet"):
        assert caplog.text.count(said) == 1


def test_a_full_redis_is_not_taken_for_a_lack_of_workers(client: Client, server: InProcessServer) -> None:
    with Redis.from_url(client.redis_url) as redis:
        redis.config_set("maxmemory", 1)
        refused = httpx2.post(f"{server.url}/v1/chat/completions", json=BODY, timeout=60)
        redis.config_set("maxmemory", 0)
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (503, "unavailable")
    assert error["message"] == "Redis takes nothing in: try again later"


def test_a_redis_that_is_away_is_not_taken_for_a_lack_of_room(client: Client, server: InProcessServer) -> None:
    folder = ValkeyPaths.of(client.settings.data_dir).folder
    away = folder.rename(folder.with_name("away"))
    body = {"model": MODEL.name, "rows": [{"text": "x"}], "prompt": "{text}"}
    refused = httpx2.post(f"{server.url}/jobs", json=body, timeout=60)
    away.rename(folder)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")


def test_a_bell_that_is_refused_is_as_one_that_is_lost(
    client: Client,
    asked: "Callable[[], Future[Any]]",
    desk: LiveDesk,
    tmp_path: Path,
    wait_until: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The request is queued, and whoever asked waits for its answer."""
    ring = LiveRequests.ring

    def ring_too_late(requests: LiveRequests, *rung: LiveRequest) -> None:
        # Who connects only now is refused before there is a bell.
        ring(requests, *rung)
        with full_disk(tmp_path, wait_until):
            ring(requests, *rung)

    monkeypatch.setattr(LiveRequests, "ring", ring_too_late)
    answer = asked()
    wait_until(lambda: "1 requests wait for a sweeper" in caplog.text or answer.done(), "the bell is refused")
    (request_id,) = desk.open_ids()
    with StreamPublisher(client.redis_url) as publisher:
        publisher.open(request_id, 1)
        publisher.finish(request_id, StreamEnd("stop", "Here.", StreamUsage(1, 0, 1)))
    assert answer.result(60).json()["choices"][0]["message"]["content"] == "Here."


def test_a_client_that_gives_up_on_an_answer_calls_it_off(
    client: Client,
    tmp_path: Path,
    start: Callable[..., "Future[Any]"],
    wait_until: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody knows its id, and whoever asks again would have both computed."""
    monkeypatch.setattr(asking, "_PATIENCE_SECONDS", 0.05)
    monkeypatch.setattr(asking, "_LOOKS_PER_TRY", 1)
    with live_desk(tmp_path) as desk:
        asked = start(client.generate, "Where is my parcel?", MODEL, start_worker=False)
        wait_until(lambda: desk.open_ids() or asked.done(), "the request is taken")
        (request_id,) = desk.open_ids()
        with full_disk(tmp_path, wait_until):
            with pytest.raises(GenerationError, match="takes nothing in") as given_up:
                asked.result(60)
            assert given_up.value.code == "unavailable"
            assert not desk.get(request_id).is_cancelled
        wait_until(lambda: desk.get(request_id).is_cancelled, "it is called off")


def test_what_redis_refuses_to_call_off_is_kept_for_a_while(
    client: Client, tmp_path: Path, wait_until: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not past its deadline, and not more than some."""
    monkeypatch.setattr(cancellations, "_MOST_KEPT", 2)
    first, second, late = (
        LiveRequest.new(queue="q", model="m", prompt_token_ids=[1], sampling=SamplingSpec(), timeout_seconds=seconds)
        for seconds in (600.0, 600.0, -10.0)
    )
    client.live.submit(first, second, late)
    with Cancellations(client.live) as called_off, full_disk(tmp_path, wait_until):
        called_off.add([first, second, late])
        wait_until(lambda: list(called_off._deadlines) == [second.id, late.id], "Redis has refused")
    assert [client.live.get(each.id).is_cancelled for each in (first, second, late)] == [False, True, False]
    assert not called_off._deadlines


def test_a_failover_ends_no_request(
    client: Client,
    server: InProcessServer,
    tmp_path: Path,
    start: Callable[..., "Future[Any]"],
    wait_until: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Redis that refuses what is written is given some time, however often it is looked at otherwise."""
    monkeypatch.setattr(live_answers, "_REFUSED_SECONDS", 60.0)
    request = LiveRequest.new(queue="q", model="m", prompt_token_ids=[1], sampling=SamplingSpec())
    client.live.submit(request)
    with StreamPublisher(client.redis_url) as publisher:
        with full_disk(tmp_path, wait_until):
            read = start(httpx2.get, f"{server.url}/requests/{request.id}/stream", timeout=60)
            wait_until(lambda: "wait for nothing any more" in caplog.text, "Redis is found to refuse")
            assert not wait([read], 0.5).done
        publisher.open(request.id, 1)
        publisher.finish(request.id, StreamEnd("stop", "Here.", StreamUsage(1, 0, 1)))
        assert '"text":"Here."' in read.result(60).text


def test_past_its_deadline_nobody_waits(client: Client, server: InProcessServer) -> None:
    request = LiveRequest.new(
        queue="q", model="m", prompt_token_ids=[1], sampling=SamplingSpec(), timeout_seconds=-10.0
    )
    client.live.submit(request)
    with httpx2.stream("GET", f"{server.url}/requests/{request.id}/stream", timeout=60) as response:
        (data,) = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    assert json.loads(data)["error"]["code"] == "deadline_exceeded"


def test_a_redis_that_is_away_has_lost_no_answer(
    client: Client, server: InProcessServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request is known to have ended, and its stream can not be read for longer than one waits for the end."""
    request = LiveRequest.new(queue="q", model="m", prompt_token_ids=[1], sampling=SamplingSpec())
    client.live.submit(request)
    with StreamPublisher(client.redis_url) as publisher:
        publisher.open(request.id, 1)
        publisher.finish(request.id, StreamEnd("stop", "Here.", StreamUsage(1, 0, 1)))
    with Redis.from_url(client.redis_url) as redis:
        redis.hset(request_key(request.id), "state", LiveState.ENDED)
    fetch, times = Fetcher.fetch, iter(range(4))

    async def away_at_first(fetcher: Fetcher, key: str, last: int) -> Fetched:
        if next(times, None) is not None:
            await asyncio.sleep(60)
        return await fetch(fetcher, key, last)

    monkeypatch.setattr(Fetcher, "fetch", away_at_first)
    answer = httpx2.get(f"{server.url}/requests/{request.id}/stream", timeout=60)
    assert '"text":"Here."' in answer.text
