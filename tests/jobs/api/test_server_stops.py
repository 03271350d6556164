"""A server that is told to stop while answers are open."""

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastapi.testclient import TestClient
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from headrace.jobs.api.app import create_app
from headrace.jobs.api.models import ServedModels
from headrace.jobs.broker.celery_app import live_queue, shard_queue
from headrace.jobs.client.client import Client
from headrace.jobs.live.requests import LiveRequests
from headrace.jobs.settings import Settings
from headrace.jobs.spec.precision import Precision
from headrace.jobs.workers.presence import WorkerId, WorkerPresence

from ..running import MODEL, environment
from .in_process import InProcessServer, in_process_server

# The thread that calls off what nobody reads any more.
CALLING_OFF = "live cancellations"
CHAT: dict[str, Any] = {"model": MODEL.name, "messages": [{"role": "user", "content": "x"}]}


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    with Client(Settings.from_environment(environment(tmp_path))) as client:
        yield client


@pytest.fixture
def server(client: Client, lasting_presence: None) -> Iterator[InProcessServer]:
    with WorkerPresence(client.redis_url) as presence:
        presence.announce(shard_queue(str(MODEL), Precision()), WorkerId.own())
    with in_process_server(client) as server:
        yield server


def test_open_answers_are_told(client: Client, server: InProcessServer, wait_until: Callable[..., None]) -> None:
    with httpx2.Client(base_url=server.url, timeout=60) as http:
        waiting: list[httpx2.Response] = []
        waiter = threading.Thread(target=lambda: waiting.append(http.post("/v1/chat/completions", json=CHAT)))
        streamed = http.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True})
        resumable = {"stream": True, "cancel_on_disconnect": False}
        with streamed as chunks, http.stream("POST", "/v1/chat/completions", json=CHAT | resumable) as kept:
            request_id = kept.headers["x-request-id"]
            raw_path = f"/requests/{request_id}/stream"
            url = f"{server.url.replace('http', 'ws')}{raw_path}"
            with http.stream("GET", raw_path) as raw, connect(url, open_timeout=60) as ws:
                waiter.start()
                first = [next(response.iter_lines()) for response in (raw,)]
                wait_until(
                    lambda: client.live.num_waiting(live_queue(str(MODEL), Precision())) == 3, "all three are asked"
                )
                server.stop()
                assert first == ["retry: 1000"]
                with pytest.raises(ConnectionClosed):
                    ws.recv()
                assert ws.close_code == 1012
            told = [json.loads(list(each.iter_lines())[-2].removeprefix("data: "))["error"] for each in (chunks, kept)]
    waiter.join(60)
    assert [error["code"] for error in told] == ["server_stops"] * 2
    assert raw_path in told[1]["message"]
    assert waiting[0].status_code == 503
    assert waiting[0].json()["error"]["code"] == "server_stops"
    assert waiting[0].headers["Retry-After"]


def test_what_is_called_off_last_is_so_before_its_connections_close(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[set[str]] = []
    close = LiveRequests.__exit__

    def closed(requests: LiveRequests, *exc_info: object) -> None:
        left.append({thread.name for thread in threading.enumerate()})
        close(requests, *exc_info)

    monkeypatch.setattr(LiveRequests, "__exit__", closed)
    app = create_app(client, ServedModels.of([str(MODEL)]))
    with TestClient(app):
        assert CALLING_OFF in {thread.name for thread in threading.enumerate()}
    assert len(left) == 1
    assert CALLING_OFF not in left[0]
