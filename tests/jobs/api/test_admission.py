"""Who is let in, what exists for whom, and how much each may ask; without a worker."""

import functools
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient
from starlette.testclient import WebSocketDenialResponse
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from headrace.jobs.api import authentication, inputs
from headrace.jobs.api.app import create_app
from headrace.jobs.api.models import ServedModels
from headrace.jobs.api.openai.asking import Asked
from headrace.jobs.api.openai.respond import close
from headrace.jobs.api.rate_limits import RateLimits
from headrace.jobs.api.server import is_loopback
from headrace.jobs.api.ttl_cache import TtlCache
from headrace.jobs.client import Client
from headrace.jobs.live.requests import LiveRequest
from headrace.jobs.open_ledger import open_ledger
from headrace.jobs.schemas import SamplingSpec
from headrace.jobs.settings import Settings
from headrace.jobs.streams.publisher import StreamPublisher
from headrace.storage.database import Database
from headrace.storage.errors import LedgerUnavailable
from headrace.storage.ledger import Ledger
from headrace.storage.records import NewJob, NewShard
from headrace.storage.tables import metadata

from ..running import MODEL, environment
from .conftest import start_api, stop_api

WaitUntil = Callable[..., None]
QUEUE = "headrace.live.test"
JOB = {"model": "model", "rows": [{"text": "Where is my parcel?"}], "prompt": "{text}", "choices": ["a", "b"]}
# Prompt and answer tokens of a request to the probe.
COST = 30
HOLD = """
import sys, time
from headrace.jobs.open_ledger import open_ledger
from headrace.jobs.api.rate_limits import RateLimits
limits = RateLimits(sys.argv[1], entry_seconds=float(sys.argv[2]))
print(limits.admit("acme", None, 100, num_tokens=80, request_id="r")[0].refused_by, flush=True)
time.sleep(600)
"""


def probe(app: FastAPI) -> None:
    """What a route of live requests does, without the request."""

    @app.post("/probe")
    def admit(request: Request) -> dict[str, Any]:
        with app.state.admission.admit_live(request, QUEUE, COST - 10, 10):
            return {"tenant": request.state.tenant}

    @app.post("/open")
    def begin(request: Request) -> None:
        app.state.open = app.state.admission.admit_live(request, QUEUE, COST - 10, 10)


@dataclass
class Desk:
    """The API in this process, without its server."""

    client: Client
    http: TestClient
    app: FastAPI
    secrets: dict[str, str] = field(default_factory=dict)

    @property
    def ledger(self) -> Ledger:
        return self.client.ledger

    def key(self, tenant: str) -> dict[str, str]:
        """The headers of a tenant's requests."""
        if tenant not in self.secrets:
            self.secrets[tenant] = self.ledger.api_keys.create(tenant).secret
        return {"Authorization": f"Bearer {self.secrets[tenant]}"}

    def submit(self, tenant: str, **headers: str) -> httpx2.Response:
        return self.http.post("/jobs", json=JOB, headers={**self.key(tenant), **headers})

    def probe(self, tenant: str) -> httpx2.Response:
        return self.http.post("/probe", headers=self.key(tenant))


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with Client(Settings.from_environment(environment(tmp_path_factory.mktemp("data")))) as client:
        yield client


@pytest.fixture(scope="module")
def models() -> ServedModels:
    return ServedModels.of([str(MODEL)])


@pytest.fixture
def desk(client: Client, models: ServedModels, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    """With an empty ledger and nothing remembered."""
    with client.ledger._database.write() as connection:
        for table in reversed(metadata.sorted_tables):
            connection.execute(table.delete())
    app = create_app(client, models)
    probe(app)
    with TestClient(app) as http:
        yield Desk(client, http, app)


def assert_refused(response: httpx2.Response) -> str:
    assert response.status_code == 401, response.text
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
    assert response.headers["WWW-Authenticate"] == "Bearer"
    return error["message"]


def assert_limited(response: httpx2.Response, kind: str) -> int:
    """The seconds after which to try again."""
    assert response.status_code == 429, response.text
    error = response.json()["error"]
    assert (error["type"], error["code"]) == (kind, "rate_limit_exceeded")
    return int(response.headers["Retry-After"])


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


def test_what_watches_over_the_process_needs_none(desk: Desk, client: Client, models: ServedModels) -> None:
    desk.key("acme")
    for path in ("/health", "/ready", "/metrics"):
        assert desk.http.get(path).status_code == 200
    for path in ("/health/", "//health", "/Health", "/ready/../jobs", "/metrics/x"):
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


def test_a_revoked_key_holds_no_longer_than_it_is_remembered(
    client: Client, models: ServedModels, monkeypatch: pytest.MonkeyPatch, desk: Desk, wait_until: WaitUntil
) -> None:
    first, other = desk.ledger.api_keys.create("acme"), desk.key("other")
    ring = authentication.KeyRing(desk.ledger.api_keys, seconds=0.2)
    assert ring.tenant_of(first.secret) == "acme"
    desk.ledger.api_keys.revoke(first.record.id)
    # It is still remembered, and nothing asks the ledger.
    assert ring.tenant_of(first.secret) == "acme"
    wait_until(lambda: ring.tenant_of(first.secret) is authentication.Refused.UNKNOWN, "the key is refused")
    # That it was the last key opens nothing.
    desk.ledger.api_keys.revoke(next(key.id for key in desk.ledger.api_keys.all() if key.tenant == "other"))
    assert_refused(desk.http.post("/probe"))
    assert_refused(desk.http.post("/probe", headers=other))


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


def test_what_is_remembered_is_bounded_in_time_and_number(wait_until: WaitUntil) -> None:
    cache: TtlCache[int, int] = TtlCache(seconds=0.0, stale_seconds=0.1, max_entries=2)

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
    assert cache.get(2, away) == 2
    wait_until(lambda: is_forgotten(2), "what is stale is used no longer")


def belongings(desk: Desk, tenant: str) -> dict[str, str]:
    """One of everything that has an id, by the name that the routes have for it."""
    key = desk.key(tenant)
    line = '{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"model": "model", "prompt": "a"}}'
    file = desk.http.post(
        "/v1/files", headers=key, files={"file": ("in.jsonl", line.encode())}, data={"purpose": "batch"}
    )
    batch = {"input_file_id": file.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    request = LiveRequest.new(
        queue="headrace.live.other", model="model", prompt_token_ids=[1], sampling=SamplingSpec(), tenant=tenant
    )
    desk.client.live.submit(request)
    return {
        "job_id": desk.submit(tenant).json()["id"],
        "file_id": file.json()["id"],
        "batch_id": desk.http.post("/v1/batches", headers=key, json=batch).json()["id"],
        "request_id": request.id,
    }


# Ids that belong to nobody.
COMMON = {"model"}
# What is looked for within what has an id.
PARTS = {"row": "0"}
BODIES: dict[str, dict[str, Any]] = {"/jobs/{job_id}/priority": {"priority": 1}}


def test_what_is_another_tenants_does_not_exist(desk: Desk) -> None:
    owned = belongings(desk, "acme")
    routes = desk.app.openapi()["paths"]
    seen = set()
    for path, method in [(path, method) for path, methods in routes.items() for method in methods]:
        names = {name for name in owned if f"{{{name}}}" in path}
        assert names or "{" not in path or any(f"{{{name}}}" in path for name in COMMON), f"teach this test {path}"
        if names:
            seen |= names
            body = BODIES.get(path)
            answer = desk.http.request(method, path.format(**owned, **PARTS), headers=desk.key("other"), json=body)
            assert answer.status_code == 404, (method, path, answer.text)
            (code,) = {name.removesuffix("_id") + "_not_found" for name in names}
            assert answer.json()["error"]["code"] == code, (method, path)
            assert answer.json() == desk.http.request(
                method, path.format(**dict.fromkeys(owned, "unknown"), **PARTS), headers=desk.key("other"), json=body
            ).json() | {"error": answer.json()["error"]}
    assert seen == owned.keys()
    # Its owner has lost nothing.
    for path in ("/jobs/{job_id}", "/v1/files/{file_id}", "/v1/batches/{batch_id}", "/jobs/{job_id}/results"):
        assert desk.http.get(path.format(**owned), headers=desk.key("acme")).status_code == 200, path
    assert desk.http.get(f"/jobs/{owned['job_id']}", headers=desk.key("acme")).json()["state"] == "running"
    with pytest.raises(WebSocketDenialResponse):
        desk.http.websocket_connect(f"/requests/{owned['request_id']}/stream", headers=desk.key("other")).__enter__()


def test_lists_show_ones_own(desk: Desk) -> None:
    owned = belongings(desk, "acme")
    for path, name in (("/jobs", "job_id"), ("/v1/files", "file_id"), ("/v1/batches", "batch_id")):
        own = desk.http.get(path, headers=desk.key("acme")).json()["data"]
        assert owned[name] in [item["id"] for item in own]
        assert desk.http.get(path, headers=desk.key("other")).json()["data"] == []
    # On the machine itself everything is seen.
    assert owned["job_id"] in [job.id for job in desk.client.jobs()]
    assert desk.client.job(owned["job_id"]).record.tenant == "acme"
    stolen = {"input_file_id": owned["file_id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    assert desk.http.post("/v1/batches", headers=desk.key("other"), json=stolen).status_code == 404


def test_idempotency_keys_are_the_tenants_own(desk: Desk) -> None:
    named = {"Idempotency-Key": "nightly"}
    ids = [desk.submit(tenant, **named).json()["id"] for tenant in ("acme", "other", "acme")]
    assert ids[0] == ids[2] != ids[1]


def test_requests_a_minute(desk: Desk) -> None:
    desk.ledger.tenants.set("acme", requests_per_minute=3)
    answers = [desk.probe("acme") for _ in range(3)]
    assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == ["2", "1", "0"]
    assert {answer.headers["x-ratelimit-limit-requests"] for answer in answers} == {"3"}
    refused = desk.probe("acme")
    # The first of the three comes back after a third of a minute.
    assert 18 <= assert_limited(refused, "requests") <= 20
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert refused.headers["x-ratelimit-reset-requests"].startswith(("59", "1m0"))
    # A job counts too; what only looks does not, and neither does another tenant.
    assert_limited(desk.submit("acme"), "requests")
    assert desk.http.get("/jobs", headers=desk.key("acme")).json()["data"] == []
    assert desk.probe("other").status_code == 200
    assert "x-ratelimit-limit-requests" not in desk.probe("other").headers
    # Another process has the same limit.
    with RateLimits(desk.client.redis_url) as limits:
        assert limits.admit("acme", 3)[0].refused_by == "requests"


def test_tokens_count_while_the_request_is_open(desk: Desk, wait_until: WaitUntil) -> None:
    desk.ledger.tenants.set("tokens", queued_tokens=2 * COST - 1)
    opened = desk.http.post("/open", headers=desk.key("tokens"))
    assert opened.headers["x-ratelimit-limit-tokens"] == str(2 * COST - 1)
    assert opened.headers["x-ratelimit-remaining-tokens"] == str(COST - 1)
    assert assert_limited(desk.probe("tokens"), "tokens") == 1
    for _ in range(2):
        desk.app.state.open.release()
    wait_until(lambda: desk.probe("tokens").status_code == 200, "there is room again")


def test_what_goes_on_without_its_client_holds_its_tokens_until_it_ends(desk: Desk, wait_until: WaitUntil) -> None:
    desk.ledger.tenants.set("patient", queued_tokens=2 * COST - 1)
    desk.http.post("/open", headers=desk.key("patient"))
    sampling = SamplingSpec(n=2, temperature=1.0)
    request = LiveRequest.new(queue=QUEUE, model=str(MODEL), prompt_token_ids=[1], sampling=sampling)
    asked = Asked(desk.app.state.service.models.all[0], [request], cancel_on_disconnect=False)
    asked.admissions.push(desk.app.state.open)
    answers = desk.app.state.live
    desk.http.portal.call(close, answers, asked)
    with StreamPublisher(desk.client.redis_url) as publisher:
        for stream_id in request.stream_ids:
            assert_limited(desk.probe("patient"), "tokens")
            assert answers._awaited
            publisher.open(stream_id, 1)
            publisher.finish(stream_id, "stop", "", None)
            assert publisher.flush(5)
        wait_until(lambda: desk.probe("patient").status_code == 200, "there is room again")
    assert not answers._awaited


def test_only_so_many_inputs_are_fetched_at_a_time(desk: Desk) -> None:
    job = {**JOB, "rows": None, "input_url": "https://headrace.invalid/rows.jsonl"}
    with ExitStack() as downloads:
        for _ in range(inputs._MAX_DOWNLOADS):
            downloads.enter_context(inputs._a_download())
        assert assert_limited(desk.http.post("/jobs", json=job), "requests") == 5
    assert desk.http.post("/jobs", json=job).status_code == 422


def test_a_client_cannot_have_its_job_taken_for_a_batchs(desk: Desk) -> None:
    refused = desk.submit("acme", **{"Idempotency-Key": "batch/batch_1"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (422, "Idempotency-Key")


def test_tokens_of_bulk_rows_count_too(desk: Desk) -> None:
    spec = {"sampling": {"max_tokens": 20}}
    job = NewJob("job-1", "bulk", "m", "/out", "f", num_rows=2, spec=spec, prompt_tokens=10, tenant="bulk")
    desk.ledger.create_job(job, [NewShard(0, 2, "/spool")])
    desk.ledger.tenants.set("bulk", queued_tokens=50 + COST - 1)
    assert_limited(desk.probe("bulk"), "tokens")
    desk.ledger.tenants.set("fits", queued_tokens=50 + COST)
    assert desk.probe("fits").headers["x-ratelimit-remaining-tokens"] == "50"


def test_a_job_of_too_many_tokens_leaves_nothing(desk: Desk) -> None:
    folder = desk.client.settings.data_dir / "outputs"
    before = sorted(folder.glob("*"))
    # The answer alone may have so many.
    desk.ledger.tenants.set("less", queued_tokens=256)
    assert assert_limited(desk.submit("less"), "tokens") == 15
    assert desk.http.get("/jobs", headers=desk.key("less")).json()["data"] == []
    assert sorted(folder.glob("*")) == before
    desk.ledger.tenants.set("enough", queued_tokens=600)
    assert desk.submit("enough").status_code == 201


def test_concurrent_jobs(desk: Desk) -> None:
    desk.ledger.tenants.set("acme", concurrent_jobs=1)
    first = desk.submit("acme", **{"Idempotency-Key": "first"})
    assert first.status_code == 201
    assert assert_limited(desk.submit("acme"), "requests") == 15
    # The same submission again is no second job.
    assert desk.submit("acme", **{"Idempotency-Key": "first"}).json()["id"] == first.json()["id"]
    desk.http.post(f"/jobs/{first.json()['id']}/cancel", headers=desk.key("acme"))
    assert desk.submit("acme").status_code == 201


def test_all_together_may_wait_only_so_many(desk: Desk, client: Client, models: ServedModels) -> None:
    few = client.settings.model_copy(update={"max_queued_jobs": 1, "max_open_requests": 1})
    client.settings, before = few, client.settings
    try:
        app = create_app(client, models)
        probe(app)
        desk = Desk(client, TestClient(app), app)
        assert desk.submit("acme").status_code == 201
        assert_limited(desk.submit("other"), "requests")
        assert desk.probe("acme").status_code == 200
        request = LiveRequest.new(queue=QUEUE, model="model", prompt_token_ids=[1], sampling=SamplingSpec())
        client.live.submit(request)
        assert_limited(desk.probe("other"), "requests")
    finally:
        client.settings = before


def test_what_a_killed_process_held_is_free_again(client: Client, tmp_path: Path, wait_until: WaitUntil) -> None:
    command = [sys.executable, "-c", HOLD, client.redis_url, "0.3"]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process,
        RateLimits(client.redis_url, entry_seconds=0.3) as limits,
    ):
        try:
            assert process.stdout.readline() == "None\n"
            assert limits.admit("acme", None, 100, num_tokens=10, request_id="own")[0].refused_by is None
            usage, _ = limits.admit("acme", None, 100, num_tokens=80, request_id="other")
            assert (usage.refused_by, usage.held_tokens) == ("tokens", 90)
            # It is renewed for as long as its owner lives.
            until = time.monotonic() + 0.6
            wait_until(lambda: time.monotonic() > until, "two lives of an entry have passed")
            assert limits.held_tokens("acme") == 90
        finally:
            process.send_signal(signal.SIGKILL)
        wait_until(lambda: limits.held_tokens("acme") == 10, "the dead one's have run out", seconds=5)


def test_limits_hold_when_many_come_at_once(client: Client) -> None:
    with RateLimits(client.redis_url) as limits, ThreadPoolExecutor(8) as pool:
        each = list(product(range(40), [limits]))
        admitted = list(pool.map(lambda one: one[1].admit("many", 10, 100, 0, 30, f"r{one[0]}"), each))
    # Three times thirty tokens, although ten requests were free.
    assert sum(usage.refused_by is None for usage, _ in admitted) == 3
    with RateLimits(client.redis_url) as limits:
        assert limits.held_tokens("many") == 0
        usage, _ = limits.admit("many", 10)
        # Those that were refused for their tokens did not count as requests.
        assert usage.remaining_requests == 6


def test_a_wiped_redis_forgets_and_learns_again(client: Client, wait_until: WaitUntil) -> None:
    with RateLimits(client.redis_url, entry_seconds=0.3) as limits:
        limits.admit("wiped", 5, 100, 0, 60, "r")
        limits._redis.delete(*limits._redis.keys("headrace:limits:*:wiped"))
        wait_until(lambda: limits.held_tokens("wiped") == 60, "what is open counts again", seconds=5)
    # All that is left goes by itself.
    with RateLimits(client.redis_url) as limits:
        assert all(limits._redis.pttl(key) > 0 for key in limits._redis.keys("headrace:limits:*"))


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
        with pytest.raises(InvalidStatus) as denied, connect(url):
            pass
        assert denied.value.response.status_code == 401
        assert json.loads(denied.value.response.body)["error"]["code"] == "invalid_api_key"
    finally:
        stop_api(server, tmp_path / "log")
    assert key[4:] not in (tmp_path / "log").read_text()
