"""`x-request-id`: every answer has one, errors of all kinds included."""

import logging
import re
from typing import Any

import pytest
from fastapi.testclient import TestClient
from openai import NotFoundError, OpenAI
from starlette.testclient import WebSocketDenialResponse

from headrace.storage.errors import LedgerUnavailable

from .conftest import Desk

CHAT = "/v1/chat/completions"
LARGE = b" " * (4 * 2**20 + 1)
ID = re.compile(r"req_[0-9a-f]{24}")


def id_of(response: Any) -> str:
    [request_id] = response.headers.get_list("x-request-id")
    assert ID.fullmatch(request_id)
    return request_id


def chat(**changes: Any) -> dict[str, Any]:
    return {"json": {"model": "model", "messages": [{"role": "user", "content": "x"}], **changes}}


REQUESTS: dict[str, tuple[int, str, str, dict[str, Any]]] = {
    "a page": (200, "GET", "/", {}),
    "a list": (200, "GET", "/v1/models", {}),
    "no JSON": (400, "POST", CHAT, {"content": b"{", "headers": {"Content-Type": "application/json"}}),
    "validation": (400, "POST", CHAT, chat(temperature="hot")),
    "of a stream": (400, "POST", CHAT, chat(temperature="hot", stream=True)),
    "of a job": (422, "POST", "/jobs", {"json": {}}),
    "a model": (404, "POST", CHAT, chat(model="none")),
    "a route": (404, "GET", "/nothing", {}),
    "a method": (405, "DELETE", "/v1/models", {}),
    "a size": (413, "POST", CHAT, {"content": LARGE, "headers": {"Content-Type": "application/json"}}),
    "a type": (415, "POST", CHAT, {"content": b"{}", "headers": {"Content-Type": "text/plain"}}),
    "no worker": (503, "POST", CHAT, chat()),
    "no worker of a stream": (503, "POST", CHAT, chat(stream=True)),
}


@pytest.mark.parametrize(("status", "method", "path", "request_"), REQUESTS.values(), ids=REQUESTS)
def test_every_answer_says_its_request(desk: Desk, status: int, method: str, path: str, request_: Any) -> None:
    first, second = (desk.http.request(method, path, **request_) for _ in range(2))
    assert first.status_code == status, first.text
    assert id_of(first) != id_of(second)


def test_refusals_of_keys_and_limits_too(desk: Desk) -> None:
    desk.ledger.tenants.set("acme", requests_per_minute=0)
    refused = desk.probe("acme")
    assert refused.status_code == 429
    id_of(refused)
    refused = desk.http.get("/jobs")
    assert refused.status_code == 401
    id_of(refused)
    path = f"/requests/{'req_' + 24 * '0'}/stream"
    with pytest.raises(WebSocketDenialResponse) as denied, desk.http.websocket_connect(path):
        pass
    id_of(denied.value)


def test_faults_and_a_ledger_that_is_away(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    @desk.app.get("/fault")
    def fault() -> None:
        raise ZeroDivisionError

    @desk.app.get("/away")
    def away() -> None:
        raise LedgerUnavailable("gone")

    http = TestClient(desk.app, raise_server_exceptions=False)
    away_answer = http.get("/away")
    assert away_answer.status_code == 503
    id_of(away_answer)
    with caplog.at_level(logging.ERROR):
        failed = http.get("/fault")
    assert (failed.status_code, failed.json()["error"]["code"]) == (500, "internal_error")
    assert f"GET /fault failed: {id_of(failed)}" in caplog.text
    # It was counted as one whose client had gone.
    counted = http.get("/metrics").text
    assert 'headrace_http_requests_total{method="GET",route="/fault",status="500"} 1.0' in counted


def test_the_openai_client_shows_it(desk: Desk) -> None:
    client = OpenAI(base_url="http://testserver/v1", api_key="none", max_retries=0, http_client=desk.http)
    with pytest.raises(NotFoundError) as refused:
        client.chat.completions.create(model="none", messages=[{"role": "user", "content": "x"}])
    assert ID.fullmatch(refused.value.request_id or "")
