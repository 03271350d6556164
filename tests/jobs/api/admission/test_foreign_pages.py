"""Pages of other sites in a browser that can reach a server without keys."""

import json
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastapi.testclient import TestClient
from starlette.testclient import WebSocketDenialResponse

from headrace.jobs.api.app import create_app
from headrace.jobs.api.models import ServedModels
from headrace.jobs.client.client import Client

from ..conftest import start_api, stop_api
from .conftest import JOB, Desk

# What a form of another site, or a page's own script, can send without being asked for more by the browser.
FILES = {"file": ("rows.jsonl", b'{"text": "x"}\n')}
FIELDS = {"job": json.dumps({"model": "model", "prompt": "{text}"})}
# The test client's own.
HOST = "testserver"


def code_of(response: Any) -> str | None:
    return response.json()["error"]["code"] if response.status_code == 403 else None


@pytest.mark.parametrize(
    ("headers", "is_foreign"),
    [
        ({}, False),
        ({"Origin": f"http://{HOST}"}, False),
        ({"Origin": f"http://{HOST}", "Sec-Fetch-Site": "same-origin"}, False),
        # Behind a proxy that speaks to the server by another name.
        ({"Origin": "https://headrace.example", "Sec-Fetch-Site": "same-origin"}, False),
        ({"Sec-Fetch-Site": "none"}, False),
        ({"Origin": "https://evil.example"}, True),
        ({"Origin": "null"}, True),
        ({"Origin": f"http://{HOST}:8080"}, True),
        ({"Origin": f"http://{HOST}", "Sec-Fetch-Site": "cross-site"}, True),
        ({"Sec-Fetch-Site": "same-site"}, True),
    ],
)
def test_a_page_of_another_site_does_nothing(desk: Desk, headers: dict[str, str], is_foreign: bool) -> None:
    answers = [
        desk.http.post("/jobs/upload", files=FILES, data=FIELDS, headers=headers),
        desk.http.post("/v1/files", files=FILES, data={"purpose": "batch"}, headers=headers),
        desk.http.post("/probe", headers=headers),
    ]
    assert [code_of(each) for each in answers] == 3 * ["origin_not_allowed" if is_foreign else None]
    if is_foreign:
        assert answers[0].headers["x-request-id"]
        assert desk.http.get("/jobs").json()["data"] == desk.http.get("/v1/files").json()["data"] == []
    # What it asks for its browser does not let it read, but for what comes through a WebSocket.
    assert desk.http.get("/jobs", headers=headers).status_code == 200
    with pytest.raises(WebSocketDenialResponse) as denied:
        desk.http.websocket_connect("/requests/req_1/stream", headers=headers).__enter__()
    assert denied.value.status_code == (403 if is_foreign else 404)


def test_with_a_key_it_may_come_from_anywhere(desk: Desk) -> None:
    assert desk.submit("acme", Origin="https://app.example", **{"Sec-Fetch-Site": "cross-site"}).status_code == 201


@pytest.mark.parametrize(
    ("host", "is_answered"),
    [
        ("localhost:8000", True),
        ("LOCALHOST", True),
        ("localhost.", True),
        ("headrace.localhost:8000", True),
        ("host.docker.internal:8000", True),
        ("127.0.0.1:8000", True),
        ("10.1.2.3", True),
        ("[::1]:8000", True),
        ("evil.example:8000", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example:8000", False),
        ("evil.example#.localhost", False),
        ("evillocalhost", False),
        ("[::1", False),
    ],
)
def test_a_name_that_may_be_anybodys_is_not_answered_without_a_key(
    client: Client, models: ServedModels, desk: Desk, host: str, is_answered: bool
) -> None:
    with TestClient(create_app(client, models, local_names_only=True)) as http:
        answers = [http.get("/jobs", headers={"Host": host}), http.post("/jobs", json=JOB, headers={"Host": host})]
        assert [code_of(each) for each in answers] == 2 * [None if is_answered else "host_not_allowed"]
        with pytest.raises(WebSocketDenialResponse) as denied:
            http.websocket_connect("/requests/req_1/stream", headers={"Host": host}).__enter__()
        assert denied.value.status_code == (404 if is_answered else 403)
        # Who watches over the process may call it as he likes.
        assert http.get("/health", headers={"Host": host}).status_code == 200
    with TestClient(create_app(client, models)) as http:
        assert http.get("/jobs", headers={"Host": host}).status_code == 200


def test_with_a_key_any_name_is_answered(client: Client, models: ServedModels, desk: Desk) -> None:
    key = desk.key("acme")
    with TestClient(create_app(client, models, local_names_only=True)) as http:
        assert http.get("/jobs", headers={"Host": "headrace.example", **key}).status_code == 200


def test_a_real_server_is_nobody_elses(tmp_path: Path) -> None:
    server = start_api(tmp_path, tmp_path / "log")
    try:
        assert server.get("/jobs")["data"] == []
        assert code_of(server.http.get("/jobs", headers={"Host": "evil.example:8000"})) == "host_not_allowed"
        foreign = {"Origin": "https://evil.example"}
        assert code_of(httpx2.post(f"{server.url}/jobs/upload", files=FILES, data=FIELDS, headers=foreign)) is not None
        assert server.get("/jobs")["data"] == []
    finally:
        stop_api(server, tmp_path / "log")
