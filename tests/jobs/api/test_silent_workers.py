"""Requests for a model whose worker has not been heard of for some seconds."""

import json
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import httpx2
import pytest

from headrace.jobs.api import worker_watch
from headrace.jobs.broker.celery_app import shard_queue
from headrace.jobs.client.client import Client
from headrace.jobs.settings import Settings
from headrace.jobs.spec.precision import Precision
from headrace.jobs.workers import presence as presence_module
from headrace.jobs.workers.presence import WorkerId, WorkerPresence

from ..running import MODEL, environment
from .in_process import InProcessServer, in_process_server
from .live_desk import live_desk

WORKER = WorkerId("another-host", 7, "x")
QUEUE = shard_queue(str(MODEL), Precision())
BODY = {"model": MODEL.name, "messages": [{"role": "user", "content": "Where is my parcel?"}]}


@pytest.fixture
def presence(tmp_path: Path) -> Iterator[WorkerPresence]:
    with (
        Client(Settings.from_environment(environment(tmp_path))) as client,
        WorkerPresence(client.redis_url) as presence,
    ):
        yield presence


@pytest.fixture
def server(tmp_path: Path, presence: WorkerPresence) -> Iterator[InProcessServer]:
    with Client(Settings.from_environment(environment(tmp_path))) as client, in_process_server(client) as server:
        yield server


def fall_silent(presence: WorkerPresence, monkeypatch: pytest.MonkeyPatch, wait_until: Callable[..., None]) -> None:
    with monkeypatch.context() as short:
        short.setattr(presence_module, "TTL_SECONDS", 0.001)
        presence.announce(QUEUE, WORKER)
    wait_until(lambda: not presence.is_served(QUEUE), "the worker is silent")


def ask(server: InProcessServer) -> httpx2.Response:
    return httpx2.post(f"{server.url}/v1/chat/completions", json=BODY, timeout=60)


@pytest.fixture
def looked_for(
    presence: WorkerPresence, monkeypatch: pytest.MonkeyPatch, wait_until: Callable[..., None]
) -> Iterator[list[str]]:
    """The queues that were looked at, now that the worker has fallen silent and is waited for without an end."""
    fall_silent(presence, monkeypatch, wait_until)
    looked_for: list[str] = []
    is_served = WorkerPresence.is_served

    def note(presence: WorkerPresence, queue: str) -> bool:
        looked_for.append(queue)
        return is_served(presence, queue)

    with monkeypatch.context() as watched:
        watched.setattr(worker_watch, "RETURN_SECONDS", 1e9)
        watched.setattr(WorkerPresence, "is_served", note)
        yield looked_for


def test_a_worker_that_comes_back_is_waited_for(
    server: InProcessServer,
    presence: WorkerPresence,
    looked_for: list[str],
    tmp_path: Path,
    start: Callable[..., "Future[Any]"],
    wait_until: Callable[..., None],
) -> None:
    with live_desk(tmp_path) as desk:
        asked = start(ask, server)
        # The first look refuses, the second is that of the request that waits.
        wait_until(lambda: len(looked_for) > 1 or asked.done(), "the request waits")
        assert not asked.done()
        assert not desk.open_ids()

        def is_handed_over() -> bool:
            # As a worker does, again and again.
            presence.announce(QUEUE, WORKER)
            return bool(desk.open_ids()) or asked.done()

        wait_until(is_handed_over, "the request is handed over")
        assert desk.open_ids()
        # Nobody answers it.
        server.stop()


def test_one_that_does_not_is_not_waited_for_long(
    server: InProcessServer,
    presence: WorkerPresence,
    wait_until: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_watch, "RETURN_SECONDS", 0.01)
    fall_silent(presence, monkeypatch, wait_until)
    refused = ask(server)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_worker")
    assert refused.headers["Retry-After"] == "5"


def test_while_a_model_is_loaded_clients_are_told_to_come_again(
    server: InProcessServer, presence: WorkerPresence, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presence_module, "TTL_SECONDS", 600.0)
    presence.announce_loading(QUEUE, WORKER)
    refused = ask(server)
    assert (refused.status_code, refused.headers["Retry-After"]) == (503, "5")
    error = refused.json()["error"]
    assert (error["code"], error["type"]) == ("model_loading", "server_error")
    assert error["message"] == "the model 'model' is being loaded: try again in some seconds"


def test_whoever_leaves_waits_no_more(
    server: InProcessServer, looked_for: list[str], wait_until: Callable[..., None]
) -> None:
    url = httpx2.URL(server.url)
    body = json.dumps(BODY).encode()
    head = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection((url.host, url.port or 80)) as connection:
        connection.sendall(f"POST /v1/chat/completions HTTP/1.1\r\n{head}".encode() + body)
        wait_until(lambda: len(looked_for) > 1, "the request waits")
    answered = 'route="/v1/chat/completions",status="503"'
    wait_until(lambda: answered in httpx2.get(f"{server.url}/metrics", timeout=60).text, "the request is over")


def test_a_server_that_stops_waits_no_more(
    server: InProcessServer, looked_for: list[str], start: Callable[..., "Future[Any]"], wait_until: Callable[..., None]
) -> None:
    asked = start(ask, server)
    wait_until(lambda: len(looked_for) > 1, "the request waits")
    server.stop()
    refused = asked.result(60)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_worker")
