"""The routes under `/v1` below any client: bodies that are none, and clients that leave."""

import gzip
import json
import socket
from collections.abc import Callable
from concurrent.futures import Future
from typing import IO, Any
from urllib.parse import urlsplit

import httpx2
import pytest

from ...api_server import ApiServer
from ...running import MODEL
from ..live_desk import LiveDesk

NAME = MODEL.name
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Where is my parcel?"}]
# More tokens than can be there before somebody who leaves at once is noticed.
LONG: dict[str, Any] = {"ignore_eos": True, "max_tokens": 1900, "temperature": 0}


def post(api: ApiServer, body: bytes, kind: str = "application/json", path: str = CHAT) -> httpx2.Response:
    return api.http.post(path, content=body, headers={"Content-Type": kind})


def assert_error(response: httpx2.Response, status: int, code: str | None, param: str | None = None) -> None:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert (error["code"], error["param"], error["type"]) == (code, param, "invalid_request_error")
    assert "\n" not in error["message"]


@pytest.mark.parametrize("body", [b"{", b"\xff", b'{"model": ' + b"1" * 6000 + b"}", b"[" * 100_000])
def test_a_body_that_is_no_json(api: ApiServer, body: bytes) -> None:
    assert_error(post(api, body), 400, "invalid_json")


@pytest.mark.parametrize("body", [b"", b"null", b"[]", b'"text"', b"7"])
def test_a_body_that_is_no_object(api: ApiServer, body: bytes) -> None:
    response = post(api, body)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_only_json_is_taken(api: ApiServer) -> None:
    assert_error(post(api, b"{}", "text/plain"), 415, "not_json")


def test_a_compressed_body_is_said_to_be_one(api: ApiServer) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    response = api.http.post("/v1/chat/completions", content=gzip.compress(b"{}"), headers=headers)
    assert_error(response, 415, "encoded_body")
    assert "Content-Encoding: gzip" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"messages": "hello"}, "messages"),
        ({"messages": [7]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": "x", "\ud800": 1}]}, "messages[0]"),
        ({"model": "\ud800"}, "model"),
        ({"stop": ["a", "\ud800"]}, "stop[1]"),
        ({"stream": "yes"}, "stream"),
        ({"n": True}, "n"),
        ({"n": 10**30}, "n"),
        ({"seed": 2**64}, "seed"),
        ({"temperature": float("nan")}, "temperature"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"guided_choice": []}, "guided_choice"),
    ],
)
def test_a_field_of_the_wrong_type_is_named(api: ApiServer, changes: dict[str, Any], param: str) -> None:
    response = post(api, json.dumps({"model": NAME, "messages": MESSAGES} | changes).encode())
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize("lacking", [{"role": "user"}, {"role": "system", "content": None}])
def test_a_message_without_content_is_named(api: ApiServer, lacking: dict[str, Any]) -> None:
    error = post(api, json.dumps({"model": NAME, "messages": [*MESSAGES, lacking]}).encode()).json()["error"]
    assert error["param"] == "messages[1]"
    assert error["message"] == f"messages[1]: a message of role {lacking['role']} must have 'content'"


def test_a_content_that_is_neither_text_nor_parts(api: ApiServer) -> None:
    turn = [{"role": "user", "content": 7}]
    for path, field in (("/v1/chat/completions", "messages"), ("/v1/responses", "input")):
        error = post(api, json.dumps({"model": NAME, field: turn}).encode(), path=path).json()["error"]
        assert (error["message"], error["code"]) == (
            f"{field}[0].content: Input should be a text or a list of parts, not 7",
            "invalid_type",
        )


def test_what_is_sent_makes_no_headers_and_no_events(api: ApiServer) -> None:
    evil = "x\r\nset-cookie: a=b\r\n\r\ndata: [DONE]\n\n"
    body = {"model": NAME, "messages": [{"role": "user", "content": evil}], "user": evil, "max_tokens": 3}
    answer = api.http.post(CHAT, json=body, headers={"X-Request-Id": "mine", "X-Client-Request-Id": "mine"})
    assert answer.headers["x-request-id"].startswith("req_")
    streamed = api.http.post("/v1/completions", json={"model": NAME, "prompt": evil, "echo": True, "stream": True})
    for response in (answer, streamed):
        assert response.status_code == 200
        assert "set-cookie" not in response.headers
    lines = streamed.text.splitlines()
    assert [line for line in lines if line and not line.startswith("data: ")] == []
    assert lines.count("data: [DONE]") == 1
    for path in ("/requests/a%0d%0aset-cookie:%20a=b/stream", "/v1/models/a%0d%0aset-cookie:%20a=b"):
        refused = api.http.get(path)
        assert refused.status_code == 404
        assert "set-cookie" not in refused.headers


def test_the_bytes_of_a_stream(api: ApiServer) -> None:
    body = {"model": NAME, "messages": MESSAGES, "stream": True, "max_tokens": 4, "temperature": 0}
    response = api.http.post(CHAT, json=body | {"stream_options": {"include_usage": True}})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    *events, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert list(chunks[0])[:5] == ["id", "object", "created", "model", "system_fingerprint"]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert chunks[-2]["choices"][0]["delta"] == {}
    assert chunks[-1]["choices"] == []
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)


def test_two_streams_asked_at_once_over_one_connection(api: ApiServer) -> None:
    url = urlsplit(api.url)
    body = json.dumps({"model": NAME, "messages": MESSAGES, "stream": True, **LONG, "max_tokens": 30})
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    with socket.create_connection((url.hostname, url.port), 60) as connection, connection.makefile("rb") as file:
        connection.sendall(2 * f"{head}\r\n\r\n{body}".encode())
        first, second = (text_of(chunked_body(file)) for _ in range(2))
    assert first
    assert first == second


def chunked_body(file: IO[bytes]) -> bytes:
    assert file.readline() == b"HTTP/1.1 200 OK\r\n"
    assert b"transfer-encoding: chunked\r\n" in [line.lower() for line in iter(file.readline, b"\r\n")]
    body = b""
    while size := int(file.readline(), 16):
        body += file.read(size)
        assert file.readline() == b"\r\n"
    assert file.readline() == b"\r\n"
    return body


def text_of(answer: bytes) -> str:
    *events, done, rest = answer.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    choices = [json.loads(event.removeprefix(b"data: "))["choices"][0] for event in events]
    assert choices[-1]["finish_reason"] == "length"
    return "".join(choice["delta"].get("content", "") for choice in choices)


def test_a_client_that_leaves_a_stream_ends_its_request(api: ApiServer, desk: LiveDesk) -> None:
    body = {"model": NAME, "messages": MESSAGES, "stream": True} | LONG

    def leave() -> str:
        with api.http.stream("POST", CHAT, json=body) as response:
            next(response.iter_lines())
            return str(response.headers["x-request-id"])

    request_id = desk.cut_short(leave)
    assert desk.get(request_id).is_cancelled
    end = desk.events(request_id)[-1]
    assert (end.finish_reason, end.last < LONG["max_tokens"]) == ("abort", True)


def test_a_client_that_leaves_while_it_waits_ends_its_request(
    api: ApiServer, desk: LiveDesk, wait_until: Callable[..., None]
) -> None:
    body = json.dumps({"model": NAME, "messages": MESSAGES, "n": 2, "temperature": 1} | LONG | {"temperature": 1})
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    url = urlsplit(api.url)

    def leave() -> str:
        wait_until(lambda: not desk.open_ids(), "nothing else runs")
        asked: list[str] = []

        def is_there() -> bool:
            asked.extend(desk.open_ids())
            return bool(asked)

        with socket.create_connection((url.hostname, url.port)) as connection:
            connection.sendall((head + body).encode())
            wait_until(is_there, "the request is there")
        return f"{asked[0]}/1"

    stream_id = desk.cut_short(leave)
    assert desk.get(stream_id.partition("/")[0]).is_cancelled
    assert desk.events(stream_id)[-1].finish_reason == "abort"


def test_a_request_that_is_cancelled_elsewhere_ends_its_stream_with_an_error(api: ApiServer, desk: LiveDesk) -> None:
    body = {"model": NAME, "messages": MESSAGES, "stream": True} | LONG
    data: list[str] = []

    def leave() -> str:
        with api.http.stream("POST", CHAT, json=body) as response:
            lines = response.iter_lines()
            next(lines)
            desk.cancel(response.headers["x-request-id"])
            data[:] = [line.removeprefix("data: ") for line in lines if line]
            return str(response.headers["x-request-id"])

    desk.cut_short(leave)
    error = json.loads(data[-1])["error"]
    assert (error["code"], error["param"]) == ("cancelled", None)


def test_an_error_has_the_id_that_the_request_was_followed_by(
    api: ApiServer, desk: LiveDesk, start: Callable[..., "Future[Any]"], wait_until: Callable[..., None]
) -> None:
    answers: list[httpx2.Response] = []

    def call_off() -> str:
        wait_until(lambda: not desk.open_ids(), "nothing else runs")
        asking = start(api.http.post, CHAT, json={"model": NAME, "messages": MESSAGES} | LONG)
        asked: list[str] = []

        def is_there() -> bool:
            asked.extend(desk.open_ids())
            return bool(asked)

        wait_until(is_there, "the request is there")
        desk.cancel(asked[0])
        answers[:] = [asking.result()]
        return asked[0]

    request_id = desk.cut_short(call_off)
    assert answers[0].json()["error"]["code"] == "cancelled"
    assert answers[0].headers.get_list("x-request-id") == [request_id]
