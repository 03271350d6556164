"""Pages of other sites that the operator lets use the API from a browser (CORS)."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastapi.testclient import TestClient
from openai import OpenAI
from starlette.testclient import WebSocketDenialResponse
from websockets.sync.client import connect

from headrace.jobs.api.app import create_app
from headrace.jobs.api.models import ServedModels
from headrace.jobs.client.client import Client
from headrace.jobs.settings import Settings

from ...running import environment
from ..conftest import start_api, stop_api
from .conftest import JOB

PAGE = "https://app.example.com"
OTHER = "https://evil.example"
STREAM = f"/requests/{'req_' + 24 * '0'}/stream"


def asked_by(origin: str) -> dict[str, str]:
    """What a browser adds of itself."""
    return {"Origin": origin, "Sec-Fetch-Site": "cross-site"}


def preflight(http: Any, path: str, origin: str, method: str = "POST", headers: str = "authorization") -> Any:
    wanted = {"Access-Control-Request-Method": method, "Access-Control-Request-Headers": headers}
    return http.options(path, headers={**asked_by(origin), **wanted})


def reader_of(response: Any) -> str | None:
    """The origin whose pages may read an answer."""
    return response.headers.get("Access-Control-Allow-Origin")


def opened(client: Client, models: ServedModels) -> Iterator[TestClient]:
    app = create_app(client, models, local_names_only=True)

    @app.get("/fault")
    def fault() -> None:
        raise ZeroDivisionError

    with TestClient(app, base_url="http://localhost:8000", raise_server_exceptions=False) as http:
        yield http


@pytest.fixture
def page_client(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Client]:
    origins = getattr(request, "param", f"http://localhost:3000,{PAGE}")
    with Client(Settings.from_environment(environment(tmp_path, HEADRACE_ALLOWED_ORIGINS=origins))) as client:
        yield client


@pytest.fixture
def http(page_client: Client, models: ServedModels) -> Iterator[TestClient]:
    yield from opened(page_client, models)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/jobs", "/v1/files/file-1", STREAM, "/nothing"])
def test_a_preflight_needs_no_key(page_client: Client, http: TestClient, path: str) -> None:
    page_client.ledger.api_keys.create("acme")
    # What OpenAI's client for browsers sends among others.
    headers = "authorization,content-type,idempotency-key,last-event-id,traceparent,x-stainless-retry-count"
    for method in ("GET", "POST", "DELETE"):
        allowed = preflight(http, path, PAGE, method, headers)
        assert (allowed.status_code, reader_of(allowed)) == (200, PAGE)
        assert allowed.headers["Access-Control-Allow-Headers"] == headers
        assert method in allowed.headers["Access-Control-Allow-Methods"]
        assert "Origin" in allowed.headers["Vary"]
    refused = preflight(http, path, OTHER)
    assert (refused.status_code, reader_of(refused)) == (400, None)


def test_a_public_page_may_reach_this_machine(http: TestClient) -> None:
    wanted = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Private-Network": "true"}
    allowed = http.options("/jobs", headers={**asked_by(PAGE), **wanted})
    assert (allowed.status_code, allowed.headers["Access-Control-Allow-Private-Network"]) == (200, "true")


@pytest.mark.parametrize(
    ("status", "method", "path"),
    [
        (200, "GET", "/v1/models"),
        (200, "GET", "/health"),
        (404, "GET", STREAM),
        (404, "GET", "/nothing"),
        (405, "PUT", "/jobs"),
        (415, "POST", "/v1/chat/completions"),
        (500, "GET", "/fault"),
    ],
)
def test_the_page_may_read_every_answer(http: TestClient, status: int, method: str, path: str) -> None:
    for origin in (PAGE, "http://localhost:3000"):
        answer = http.request(method, path, headers=asked_by(origin))
        assert (answer.status_code, reader_of(answer)) == (status, origin)
        assert answer.headers["Access-Control-Expose-Headers"] == "*"
        assert "Origin" in answer.headers["Vary"]
        assert len(answer.headers.get_list("x-request-id")) == 1


def test_it_may_read_why_its_key_is_refused(page_client: Client, http: TestClient) -> None:
    key = page_client.ledger.api_keys.create("acme").secret
    refused = http.post("/jobs", json=JOB, headers=asked_by(PAGE))
    assert (refused.status_code, reader_of(refused)) == (401, PAGE)
    page_client.ledger.tenants.set("acme", requests_per_minute=0)
    limited = http.post("/jobs", json=JOB, headers={**asked_by(PAGE), "Authorization": f"Bearer {key}"})
    assert (limited.status_code, reader_of(limited)) == (429, PAGE)


def test_without_a_key_it_does_what_other_pages_may_not(http: TestClient) -> None:
    refused = http.post("/jobs", json=JOB, headers=asked_by(OTHER))
    assert (refused.status_code, reader_of(refused)) == (403, None)
    assert "--allowed-origins" in refused.json()["error"]["message"]
    created = http.post("/jobs", json=JOB, headers=asked_by(PAGE))
    assert (created.status_code, reader_of(created)) == (201, PAGE)
    # Its own name may still not be that of this machine.
    renamed = http.post("/jobs", json=JOB, headers={**asked_by(PAGE), "Host": "app.example.com"})
    assert (renamed.status_code, reader_of(renamed)) == (403, PAGE)
    for origin, status in ((OTHER, 403), (PAGE, 404)):
        with pytest.raises(WebSocketDenialResponse) as denied:
            # The test client has a host of its own for WebSockets.
            http.websocket_connect(STREAM, headers={**asked_by(origin), "Host": "localhost"}).__enter__()
        assert denied.value.status_code == status


@pytest.mark.parametrize("page_client", ["*"], indirect=True)
def test_any_page_may_where_the_operator_says_so(http: TestClient) -> None:
    for origin in (OTHER, "null"):
        assert (allowed := preflight(http, "/jobs", origin)).status_code == 200
        created = http.post("/jobs", json=JOB, headers=asked_by(origin))
        assert created.status_code == 201
        assert reader_of(allowed) == reader_of(created) == "*"


@pytest.mark.parametrize("page_client", [""], indirect=True)
def test_none_may_otherwise(http: TestClient) -> None:
    assert preflight(http, "/jobs", PAGE).status_code == 405
    assert reader_of(http.get("/jobs", headers=asked_by(PAGE))) is None


def test_the_page_reads_a_stream(served: Path, tmp_path: Path) -> None:
    server = start_api(served, tmp_path / "log", HEADRACE_ALLOWED_ORIGINS=PAGE)
    try:
        with OpenAI(base_url=f"{server.url}/v1", api_key="none", default_headers=asked_by(PAGE)) as client:
            messages: Any = [{"role": "user", "content": "Where is my parcel?"}]
            streaming = client.chat.completions.with_streaming_response
            with streaming.create(model="model", messages=messages, stream=True) as answer:
                assert answer.headers["Access-Control-Allow-Origin"] == PAGE
                assert list(answer.iter_lines())[-2:] == ["data: [DONE]", ""]
                request_id = answer.headers["x-request-id"]
        again = httpx2.get(f"{server.url}/requests/{request_id}/stream", headers=asked_by(PAGE))
        assert reader_of(again) == PAGE
        assert "finish_reason" in again.text
        socket_url = f"{server.url.replace('http', 'ws', 1)}/requests/{request_id}/stream"
        with connect(socket_url, additional_headers=asked_by(PAGE)) as socket:
            assert "finish_reason" in list(socket)[-1]
    finally:
        stop_api(server, tmp_path / "log")
