"""Clients that begin a request and do not go on: they are not waited for, whichever part of it they have left out."""

import asyncio
import json
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from starlette.types import Message, Receive, Scope, Send

from headrace.jobs.api import body_limit, http_protocol
from headrace.jobs.api.body_limit import BodyLimit
from headrace.jobs.client.client import Client
from headrace.jobs.settings import Settings

from ..running import environment
from .in_process import InProcessServer, in_process_server

JSON_ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/batches", "/jobs")
FORM_ROUTES = ("/v1/files", "/jobs/upload")
FORM = "multipart/form-data; boundary=x"
BEGUN = {
    **dict.fromkeys(JSON_ROUTES, ("application/json", "{")),
    **dict.fromkeys(FORM_ROUTES, (FORM, '--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nba')),
}


@pytest.fixture
def server(tmp_path, monkeypatch) -> Iterator[InProcessServer]:
    monkeypatch.setattr(body_limit, "SILENCE_SECONDS", 0.2)
    monkeypatch.setattr(http_protocol, "HEADER_SECONDS", 0.2)
    with (
        Client(Settings.from_environment(environment(tmp_path))) as client,
        in_process_server(client) as server,
    ):
        yield server


def said_to(server: InProcessServer, text: str) -> bytes:
    """All that comes back until the server closes the connection."""
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port), timeout=60) as connection:
        connection.sendall(text.encode())
        return b"".join(iter(lambda: connection.recv(4096), b""))


@pytest.mark.parametrize("path", BEGUN)
def test_a_body_that_stops_short_is_given_up(server, path):
    kind, body = BEGUN[path]
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\nContent-Length: 10000\r\n\r\n"
    answer, _, told = said_to(server, head + body).partition(b"\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 408 Request Timeout\r\n"), answer
    error = json.loads(told)["error"]
    assert (error["code"], error["type"]) == ("body_timeout", "invalid_request_error")
    assert "0.2 s" in error["message"]


@pytest.mark.parametrize(
    "begun",
    ["", "\r\n", "GET /health HT", "GET /health HTTP/1.1\r\nHost: localhost\r\nX-More: "],
    ids=["nothing", "an empty line", "half a line", "headers without an end"],
)
def test_headers_that_do_not_end_are_given_up(server, begun):
    assert said_to(server, begun) == b""


def test_the_next_request_of_a_connection_has_its_time_too(server):
    whole = "GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    answers = said_to(server, f"{whole}{whole}GET /hea")
    assert answers.count(b"HTTP/1.1 200 OK") == 2


def test_a_body_may_take_its_time_as_long_as_something_comes(monkeypatch):
    """By the event loop's own clock, on which each piece takes nearly as long as may be."""
    num_pieces, seconds = 10, body_limit.SILENCE_SECONDS - 1
    passed, read = 0.0, b""
    scope: Scope = {"type": "http", "path": "/v1/files", "headers": []}

    async def receive() -> Message:
        nonlocal passed
        passed += seconds
        await asyncio.sleep(0)
        return {"type": "http.request", "body": b"x", "more_body": passed < num_pieces * seconds}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal read
        is_open = True
        while is_open:
            message = await receive()
            read, is_open = read + message["body"], message["more_body"]

    async def send(message: Message) -> None:
        raise AssertionError(message)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        now = loop.time
        monkeypatch.setattr(loop, "time", lambda: now() + passed)
        await BodyLimit(app, 100, {})(scope, receive, send)

    asyncio.run(main())
    assert read == b"x" * num_pieces


def test_who_has_sent_all_may_be_silent_for_as_long_as_he_likes(monkeypatch):
    monkeypatch.setattr(body_limit, "SILENCE_SECONDS", 0.0)
    scope: Scope = {"type": "http", "path": "/", "headers": []}
    messages: list[Message] = [{"type": "http.request", "body": b"", "more_body": False}, {"type": "http.disconnect"}]
    told: list[Message] = []

    async def receive() -> Message:
        if len(messages) == 1:
            # Longer than nothing.
            await asyncio.sleep(0.01)
        return messages.pop(0)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        told.extend([await receive(), await receive()])

    async def send(message: Message) -> None:
        raise AssertionError(message)

    asyncio.run(BodyLimit(app, 100, {})(scope, receive, send))
    assert told[-1]["type"] == "http.disconnect"
