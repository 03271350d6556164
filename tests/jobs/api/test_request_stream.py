"""A request's raw stream over HTTP and over WebSocket: from the start, from the middle, and by those it is not for."""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastapi.testclient import TestClient
from starlette.testclient import WebSocketDenialResponse
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from headrace.jobs.api.app import create_app
from headrace.jobs.api.models import ServedModels
from headrace.jobs.client.client import Client
from headrace.jobs.live.requests import LiveRequest, LiveRequests
from headrace.jobs.settings import Settings
from headrace.jobs.spec.sampling import SamplingSpec
from headrace.jobs.streams.keys import stream_key

from ..running import MODEL, environment
from .conftest import ApiServer
from .live_desk import LiveDesk

BODY: dict[str, Any] = {
    "model": MODEL.name,
    "messages": [{"role": "user", "content": "Where is my parcel?"}],
    "temperature": 0,
    "max_tokens": 30,
    "ignore_eos": True,
}
Event = tuple[str, str | None, dict[str, Any]]


def ask(api: ApiServer, **changes: Any) -> tuple[str, dict[str, Any]]:
    """An answered request's id, and its answer."""
    response = api.http.post("/v1/chat/completions", json=BODY | changes).raise_for_status()
    return response.headers["x-request-id"], response.json()


def sse(lines: Iterable[str]) -> Iterator[Event]:
    """The id, the type and the data of each server-sent event."""
    fields: dict[str, str] = {}
    for line in lines:
        if line:
            name, _, value = line.partition(": ")
            fields[name] = value
        elif "data" in fields:
            yield fields["id"], fields.get("event"), json.loads(fields["data"])
            fields = {}
        else:
            fields = {}


def read(api: ApiServer, path: str, headers: dict[str, str] | None = None) -> list[Event]:
    with api.http.stream("GET", path, headers=headers or {}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        return list(sse(response.iter_lines()))


def texts_of(events: list[Event]) -> list[str]:
    return [text for _, _, data in events for text in data.get("texts", [data["text"]])]


def test_the_whole_stream(api: ApiServer) -> None:
    request_id, answer = ask(api, logprobs=True)
    events = read(api, f"/requests/{request_id}/stream")
    assert "".join(data["text"] for _, _, data in events) == answer["choices"][0]["message"]["content"]
    *tokens, (last_id, kind, end) = events
    number = 0
    for event_id, event, data in tokens:
        assert (event, data["type"], data["first"]) == (None, "tokens", number + 1)
        number += len(data["token_ids"])
        assert event_id == str(number)
        assert len(data["texts"]) == len(data["token_ids"]) == len(data["logprobs"])
        assert "".join(data["texts"]) == data["text"]
    assert (last_id, kind, number) == ("30", "end", 30)
    usage = answer["usage"]
    assert end == {
        "type": "end",
        "num_tokens": 30,
        "finish_reason": "length",
        "text": end["text"],
        "usage": {
            "prompt_tokens": usage["prompt_tokens"],
            "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            "completion_tokens": 30,
        },
    }


def test_the_end_says_what_stopped_the_answer(api: ApiServer) -> None:
    request_id, _ = ask(api)
    texts = texts_of(read(api, f"/requests/{request_id}/stream"))
    token = read(api, f"/requests/{request_id}/stream")[0][2]["token_ids"][0]
    text = "".join(texts)[3:6]
    for changes, reason in (({"stop": [text]}, text), ({"stop_token_ids": [token]}, token)):
        request_id, answer = ask(api, **changes)
        assert answer["choices"][0]["stop_reason"] == reason
        end = read(api, f"/requests/{request_id}/stream")[-1][2]
        assert (end["finish_reason"], end["stop_reason"]) == ("stop", reason)
        with connect(f"{api.url.replace('http', 'ws')}/requests/{request_id}/stream", open_timeout=60) as socket:
            assert [json.loads(message) for message in socket][-1] == end


@pytest.mark.parametrize("known", [0, 1, 17, 29, 30])
def test_a_reader_goes_on_where_it_was_cut_off(api: ApiServer, known: int) -> None:
    request_id, _ = ask(api)
    whole = texts_of(read(api, f"/requests/{request_id}/stream"))
    path = f"/requests/{request_id}/stream"
    for rest in (
        read(api, path, {"Last-Event-ID": str(known)}),
        read(api, f"{path}?after={known}"),
        # What a browser sends that has begun in the middle and reconnects.
        read(api, f"{path}?after=0", {"Last-Event-ID": str(known)}),
    ):
        assert texts_of(rest) == whole[known:]
        assert rest[-1][1] == "end"


def test_a_reader_that_is_cut_off_while_the_answer_grows(
    api: ApiServer, desk: LiveDesk, wait_until: Callable[..., None]
) -> None:
    body = BODY | {"max_tokens": 600, "stream": True, "cancel_on_disconnect": False}
    with api.http.stream("POST", "/v1/chat/completions", json=body) as response:
        request_id = response.headers["x-request-id"]
        next(response.iter_lines())
    seen: list[str] = []
    last = "0"
    for _ in range(3):
        with api.http.stream("GET", f"/requests/{request_id}/stream", headers={"Last-Event-ID": last}) as response:
            event_id, kind, data = next(sse(response.iter_lines()))
        if kind == "end":
            # A machine that is slow with readers has written all of it, in few events.
            break
        last = event_id
        seen += data["texts"]
    rest = read(api, f"/requests/{request_id}/stream?after={last}")
    stored = desk.events(request_id)
    assert "".join(seen + texts_of(rest)) == "".join(event.text for event in stored)
    assert (rest[-1][2]["finish_reason"], rest[-1][2]["num_tokens"]) == ("length", 600)
    assert not desk.get(request_id).is_cancelled


def test_each_of_several_answers_has_a_stream(api: ApiServer) -> None:
    request_id, answer = ask(api, n=2, temperature=1, seed=3)
    for choice in range(2):
        events = read(api, f"/requests/{request_id}/stream?choice={choice}")
        assert "".join(texts_of(events)) == answer["choices"][choice]["message"]["content"]
    for unknown in ("2", "-1", "x", "1 "):
        assert_error(
            api.http.get(f"/requests/{request_id}/stream", params={"choice": unknown}), 404, "choice_not_found"
        )


@pytest.mark.parametrize("cursor", ["-1", "x", "1.5", "٣", "9" * 19, "17-0"])
def test_a_cursor_that_is_none(api: ApiServer, cursor: str) -> None:
    request_id, _ = ask(api, max_tokens=1)
    path = f"/requests/{request_id}/stream"
    assert_error(api.http.get(path, params={"after": cursor}), 400, "invalid_cursor")
    assert_error(api.http.get(path, headers=[(b"Last-Event-ID", cursor.encode())]), 400, "invalid_cursor")


@pytest.mark.parametrize("request_id", ["req_" + "0" * 24, "req_1", "x", "%00", "a%0d%0ab", "job_1"])
def test_an_unknown_request(api: ApiServer, request_id: str) -> None:
    assert_error(api.http.get(f"/requests/{request_id}/stream"), 404, "request_not_found")


def assert_error(response: httpx2.Response, status: int, code: str) -> None:
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)


def test_the_same_over_a_websocket(api: ApiServer) -> None:
    request_id, _ = ask(api)
    events = [data for _, _, data in read(api, f"/requests/{request_id}/stream")]
    url = f"{api.url.replace('http', 'ws')}/requests/{request_id}/stream"
    with connect(url, open_timeout=60) as socket:
        assert [json.loads(message) for message in socket] == events
        assert socket.close_code == 1000
    with connect(f"{url}?after=12", open_timeout=60) as socket:
        rest = [json.loads(message) for message in socket]
    assert rest[0]["first"] == 13
    assert rest[-1] == events[-1]
    with connect(url, open_timeout=60, additional_headers={"Last-Event-ID": "12"}) as socket:
        assert [json.loads(message) for message in socket] == rest
    for query, status in (("after=x", 400), ("choice=1", 404)):
        with pytest.raises(InvalidStatus) as refused:
            connect(f"{url}?{query}", open_timeout=60)
        assert refused.value.response.status_code == status
        assert "error" in json.loads(refused.value.response.body)


def test_an_answer_that_redis_has_lost_is_not_waited_for(
    api: ApiServer, desk: LiveDesk, wait_until: Callable[..., None]
) -> None:
    request_id, _ = ask(api)
    wait_until(lambda: desk.has_ended(request_id), "the request has ended")
    desk.forget(stream_key(request_id))
    (over_sse,) = read(api, f"/requests/{request_id}/stream?after=3")
    assert over_sse[1] == "end"
    assert (over_sse[2]["finish_reason"], over_sse[2]["error"]["code"]) == ("error", "stream_lost")
    with connect(f"{api.url.replace('http', 'ws')}/requests/{request_id}/stream", open_timeout=60) as socket:
        (end,) = map(json.loads, socket)
    assert end["error"] == over_sse[2]["error"]


def test_a_websocket_that_leaves_disturbs_nobody(api: ApiServer, desk: LiveDesk) -> None:
    body = BODY | {"max_tokens": 300, "stream": True}
    with api.http.stream("POST", "/v1/chat/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        request_id = response.headers["x-request-id"]
        with connect(f"{api.url.replace('http', 'ws')}/requests/{request_id}/stream", open_timeout=60) as socket:
            assert json.loads(socket.recv())["first"] == 1
        assert list(lines)[-2] == "data: [DONE]"
    assert not desk.get(request_id).is_cancelled


def test_what_is_another_tenants_does_not_exist(tmp_path: Path) -> None:
    with (
        Client(Settings.from_environment(environment(tmp_path))) as client,
        LiveRequests(client.redis_url, client.celery) as requests,
        TestClient(create_app(client, ServedModels.of([str(MODEL)]))) as http,
    ):
        keys = {name: client.ledger.api_keys.create(name).secret for name in ("jo", "ann")}
        asked = LiveRequest.new(
            queue="q", model="m", prompt_token_ids=[1], sampling=SamplingSpec(), tenant="jo", reply_to=None
        )
        requests.submit(asked)

        def code_for(name: str) -> str:
            path, headers = f"/requests/{asked.id}/stream?choice=1", {"Authorization": f"Bearer {keys[name]}"}
            return str(http.get(path, headers=headers).json()["error"]["code"])

        assert code_for("ann") == "request_not_found"
        assert code_for("jo") == "choice_not_found"
        url = f"/requests/{asked.id}/stream"
        with (
            pytest.raises(WebSocketDenialResponse) as refused,
            http.websocket_connect(url, headers={"Authorization": f"Bearer {keys['ann']}"}),
        ):
            pass
        assert refused.value.status_code == 404
