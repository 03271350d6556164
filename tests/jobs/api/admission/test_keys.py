"""Who is let in, without a worker."""

import asyncio
import functools
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.testclient import TestClient
from starlette.testclient import WebSocketDenialResponse
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from headrace.jobs import ttl_cache
from headrace.jobs.api import health
from headrace.jobs.api.admission import authentication
from headrace.jobs.api.app import create_app
from headrace.jobs.api.models import ServedModels
from headrace.jobs.api.server import is_loopback
from headrace.jobs.client.client import Client
from headrace.jobs.open_ledger import open_ledger
from headrace.jobs.settings import Settings
from headrace.jobs.ttl_cache import TtlCache
from headrace.storage.database import Database
from headrace.storage.errors import LedgerUnavailable

from ...running import environment
from ..conftest import start_api, stop_api
from .conftest import Desk, assert_refused


class Clock:
    """What is remembered grows old by this alone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = time.monotonic()
        monkeypatch.setattr(ttl_cache, "time", SimpleNamespace(monotonic=lambda: self.now))


def test_without_keys_everybody_is_the_default_tenant(desk: Desk) -> None:
    assert desk.http.post("/probe").json() == {"tenant": "default"}
    assert desk.http.post("/probe", headers={"Authorization": "Bearer nonsense"}).json() == {"tenant": "default"}
    # Nobody says by a header who he is.
    forged = {"X-Tenant": "acme", "Tenant": "acme", "state": "acme"}
    assert desk.http.post("/probe", headers=forged).json() == {"tenant": "default"}


def test_with_keys_a_request_needs_one(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    key = desk.key("acme")["Authorization"].removeprefix("Bearer ")
    assert "no API key" in assert_refused(desk.http.post("/probe"))
    assert desk.probe("acme").json() == {"tenant": "acme"}
    for good in (f"bearer {key}", f"Bearer   {key} "):
        assert desk.http.post("/probe", headers={"Authorization": good}).status_code == 200
    wrong = ["Bearer", "Bearer ", f"Basic {key}", key, f"Bearer {key[:-1]}", f"Bearer {key}x", f"Bearer {key} {key}"]
    wrong += [
        f"Bearer {key}, Bearer {key}",
        "Bearer " + "x" * 10_000,
        "Bearer hr-" + "x" * 10_000,
        "Bearer hr-\xff\xfe",
    ]
    for value in wrong:
        message = assert_refused(desk.http.post("/probe", headers=[(b"Authorization", value.encode("latin-1"))]))
        assert key[4:] not in message
    twice = [("Authorization", f"Bearer {key}"), ("Authorization", "Bearer hr-other")]
    assert_refused(desk.http.post("/probe", headers=twice))
    assert_refused(desk.http.get("/openapi.json"))
    assert_refused(desk.http.get("/nothing"))
    assert key[4:] not in caplog.text


def test_what_watches_over_the_process_needs_none(
    desk: Desk, client: Client, models: ServedModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "_PATIENCE_SECONDS", 60.0)
    desk.key("acme")
    for path in ("/", "/docs", "/health", "/ready", "/metrics"):
        assert desk.http.get(path).status_code == 200
    for path in ("/health/", "http://testserver//health", "/status", "/Health", "/ready/../jobs", "/metrics/x"):
        assert_refused(desk.http.get(path))
    strict = client.settings.model_copy(update={"metrics_require_key": True})
    client.settings, before = strict, client.settings
    try:
        closed = TestClient(create_app(client, models))
    finally:
        client.settings = before
    assert_refused(closed.get("/metrics"))
    assert closed.get("/health").status_code == 200


def test_of_a_request_that_is_nobodys_no_body_is_read(desk: Desk) -> None:
    desk.key("acme")
    read = threading.Event()

    def body() -> Iterator[bytes]:
        read.set()
        yield b"{}"

    async def refused() -> None:
        async def receive() -> Any:
            raise AssertionError("the body was read")

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/jobs", "headers": [], "query_string": b""}
        await desk.app(scope, receive, send)

    sent: list[Any] = []
    desk.http.portal.call(refused)
    assert sent[0]["status"] == 401


def test_a_websocket_needs_a_key_too(desk: Desk) -> None:
    path = f"/requests/{'req_' + 24 * '0'}/stream"
    key = desk.key("acme")
    with pytest.raises(WebSocketDenialResponse) as denied, desk.http.websocket_connect(path):
        pass
    assert_refused(denied.value)
    # With a key it comes as far as the route, which knows no such request.
    with pytest.raises(WebSocketDenialResponse) as denied, desk.http.websocket_connect(path, headers=key):
        pass
    assert denied.value.status_code == 404


def test_a_revoked_key_holds_no_longer_than_it_is_remembered(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    first, other = desk.ledger.api_keys.create("acme"), desk.key("other")
    ring, clock = authentication.KeyRing(desk.ledger.api_keys, seconds=3.0), Clock(monkeypatch)
    assert ring.tenant_of(first.secret) == "acme"
    desk.ledger.api_keys.revoke(first.record.id)
    # It is still remembered, and nothing asks the ledger.
    clock.now += 2.9
    assert ring.tenant_of(first.secret) == "acme"
    clock.now += 0.2
    assert ring.tenant_of(first.secret) is authentication.Refused.UNKNOWN
    # That it was the last key opens nothing.
    desk.ledger.api_keys.revoke(next(key.id for key in desk.ledger.api_keys.all() if key.tenant == "other"))
    assert_refused(desk.http.post("/probe"))
    assert_refused(desk.http.post("/probe", headers=other))


def test_a_burst_asks_the_ledger_once(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [desk.ledger.api_keys.create(tenant).secret for tenant in ("acme", "other")]
    ring, found, find = authentication.KeyRing(desk.ledger.api_keys), list[str](), desk.ledger.api_keys.find

    def noted(key: str) -> Any:
        found.append(key)
        return find(key)

    monkeypatch.setattr(ring._api_keys, "find", noted)

    async def burst() -> list[Any]:
        given = [[f"Bearer {key}"] for key in (*keys, "hr-unknown")] + [[]]
        return await asyncio.gather(*(ring.caller(each) for each in 10 * given))

    refused = authentication.Refused
    assert asyncio.run(burst()) == 10 * ["acme", "other", refused.UNKNOWN, refused.MISSING]
    assert sorted(found) == sorted([*keys, "hr-unknown"])
    assert not ring._judging


def test_while_the_ledger_is_away_known_keys_hold_for_a_minute(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    key = desk.ledger.api_keys.create("acme").secret
    ring = authentication.KeyRing(desk.ledger.api_keys, seconds=0.0)
    assert (ring.is_open(), ring.tenant_of(key)) == (False, "acme")

    def away(*_: object) -> Any:
        raise LedgerUnavailable("gone")

    with monkeypatch.context() as patch:
        patch.setattr(Database, "read", away)
        assert (ring.is_open(), ring.tenant_of(key)) == (False, "acme")
        with pytest.raises(LedgerUnavailable):
            ring.tenant_of("hr-unknown")
        # Whoever is not known yet is told to come again, not that his key is wrong.
        answer = desk.http.post("/probe", headers={"Authorization": "Bearer hr-unknown"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")


def test_what_is_remembered_is_bounded_in_time_and_number(monkeypatch: pytest.MonkeyPatch) -> None:
    cache: TtlCache[int, int] = TtlCache(seconds=1.0, stale_seconds=5.0, max_entries=2)
    clock = Clock(monkeypatch)

    def away() -> int:
        raise LedgerUnavailable("gone")

    def is_forgotten(key: int) -> bool:
        try:
            return cache.get(key, away) < 0
        except LedgerUnavailable:
            return True

    for number in range(3):
        cache.get(number, functools.partial(int, number))
    assert is_forgotten(0)
    # Past its time, and used as long as nobody can be asked.
    clock.now += 4.0
    assert cache.get(2, away) == 2
    clock.now += 2.0
    assert is_forgotten(2)


def test_addresses_of_this_machine() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "example.org", "")))


def test_a_real_server_asks_for_the_key(tmp_path: Path) -> None:
    with open_ledger(Settings.from_environment(environment(tmp_path))) as ledger:
        key = ledger.api_keys.create("acme").secret
    server = start_api(tmp_path, tmp_path / "log")
    try:
        assert_refused(server.http.post("/jobs", content=b"x" * 10**6))
        assert server.http.get("/jobs", headers={"Authorization": f"Bearer {key}"}).status_code == 200
        url = server.url.replace("http", "ws", 1) + "/requests/req_1/stream"
        with pytest.raises(InvalidStatus) as denied, connect(url, open_timeout=60):
            pass
        assert denied.value.response.status_code == 401
        assert json.loads(denied.value.response.body)["error"]["code"] == "invalid_api_key"
    finally:
        stop_api(server, tmp_path / "log")
    log = (tmp_path / "log").read_text()
    assert key[4:] not in log
    # That somebody is refused is no fault.
    assert "handshake" not in log
