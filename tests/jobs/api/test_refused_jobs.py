"""What is no job, no page and no route: a client is told what is wrong with it."""

import json
from typing import Any

import httpx2
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from .own_server import JOB, Server, assert_error

MAX_BODY_BYTES = 16 * 2**20
HALF_PAIR = "\ud800"
BAD_JOBS = {
    "no rows": ({"rows": []}, "rows"),
    "rows missing": ({"rows": None}, "rows"),
    "row is no object": ({"rows": [{"text": "a"}, "b"]}, "rows.1"),
    "no number": ({"rows": [{"text": float("nan")}]}, "rows.0.text"),
    "nested too deep": ({"rows": [{"text": json.loads("[" * 500 + "]" * 500)}]}, "rows.0.text"),
    "unknown field": ({"output": "/etc"}, "output"),
    # Its rows would name files of ours.
    "column of images": ({"image": "text"}, "image"),
    "unknown dtype": ({"dtype": "int3"}, "dtype"),
    "unknown quantization": ({"quantization": "int3"}, "quantization"),
    "unknown sampling field": ({"sampling": {"temprature": 1}}, "sampling.temprature"),
    "max_tokens of zero": ({"sampling": {"max_tokens": 0}}, "sampling.max_tokens"),
    "stop that is no text": ({"sampling": {"stop": ["a", HALF_PAIR]}}, "sampling.stop"),
    "stop of the wrong type": ({"sampling": {"stop": 7}}, "sampling.stop"),
    "stop beside choices": ({"sampling": {"stop": "a"}}, "sampling.stop"),
    "text that is none": ({"system": HALF_PAIR}, "system"),
    "template told what is no text": ({"chat_template_kwargs": {"x": HALF_PAIR}}, "chat_template_kwargs"),
    "no functions": ({"tools": []}, "tools"),
    "function without a name": ({"tools": [{"type": "function", "function": {}}]}, "tools"),
    "calls without functions": ({"choices": None, "tool_choice": "required"}, "tool_choice"),
    "choice of tools that is none": ({"tool_choice": "any"}, "tool_choice"),
    "functions that the model is not shown": ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    "field name that is no text": ({HALF_PAIR: 1}, None),
    "top_p out of range": ({"sampling": {"top_p": 4}}, "sampling.top_p"),
    "temperature is no number": ({"sampling": {"temperature": float("nan")}}, "sampling.temperature"),
    "temperature is negative": ({"sampling": {"temperature": -1}}, "sampling.temperature"),
    "no answers": ({"sampling": {"n": 0}}, "sampling.n"),
    "best_of": ({"sampling": {"best_of": 2}}, "sampling.best_of"),
    "bias out of range": ({"choices": None, "sampling": {"logit_bias": {"5": 101}}}, "sampling.logit_bias"),
    "bias of an unknown token": (
        {"choices": None, "sampling": {"logit_bias": {"999999": 1}}},
        "sampling.logit_bias",
    ),
    "unknown stop token": ({"sampling": {"stop_token_ids": [999999]}}, "sampling.stop_token_ids"),
    "top_logprobs alone": ({"choices": None, "sampling": {"top_logprobs": 2}}, "sampling.top_logprobs"),
    "no choices": ({"choices": []}, "choices"),
    "choices beyond what a worker should be busy with": ({"choices": [f"{n:08}" for n in range(16_385)]}, "choices"),
    "unknown column": ({"prompt": "{body}"}, "prompt"),
    "malformed template": ({"prompt": "{"}, "prompt"),
    "neither messages nor prompt": ({"prompt": None}, "prompt"),
}


@pytest.mark.parametrize(("changes", "param"), BAD_JOBS.values(), ids=BAD_JOBS)
def test_a_job_that_can_not_run_is_refused(server: Server, changes: dict[str, Any], param: str | None) -> None:
    before = sorted((server.data_dir / "outputs").glob("*"))
    response = post_raw(server, json.dumps(JOB | changes).encode())
    message = assert_error(response, 422, "invalid_value", param)
    assert "--" not in message
    assert sorted((server.data_dir / "outputs").glob("*")) == before
    assert not list((server.data_dir / "inputs").glob("*"))


def test_advice_is_in_the_words_of_a_request(server: Server) -> None:
    response = post_raw(server, json.dumps(JOB | {"prompt": None}).encode())
    assert 'pass "prompt": "{text}"' in assert_error(response, 422, "invalid_value", "prompt")
    response = post_raw(server, json.dumps(JOB | {"max_tokens": 5}).encode())
    told = 'max_tokens: there is no such option: say it in "sampling", such as {"sampling": {"max_tokens": …}}'
    assert assert_error(response, 422, "invalid_value", "max_tokens") == told


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b'{"rows": ' + b"1" * 6000 + b"}", b"[" * 100_000])
def test_a_body_that_is_no_json(server: Server, body: bytes) -> None:
    response = post_raw(server, body)
    assert response.status_code == (400 if body else 422)
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert "the body" in error["message"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the body: Field required"),
        (b"[]", "the body: Input should be an object with fields"),
        (json.dumps(JOB | {"sampling": "greedy"}).encode(), "sampling: Input should be an object with fields"),
        (json.dumps(JOB | {"rows": []}).encode(), "rows: List should have at least 1 item, not 0"),
    ],
)
def test_what_is_none_is_refused_in_the_words_of_json(server: Server, body: bytes, message: str) -> None:
    assert post_raw(server, body).json()["error"]["message"] == message


def test_a_bad_row_does_not_stop_its_neighbours(server: Server) -> None:
    rows = json.dumps(JOB | {"rows": [{"text": "a"}, {"text": HALF_PAIR}, {"other": 1}, {}]})
    response = post_raw(server, rows.encode())
    assert response.status_code == 201
    assert response.json()["rows"]["total"] == 4


def post_raw(server: Server, body: bytes, kind: str = "application/json") -> httpx2.Response:
    return server.http.post("/jobs", content=body, headers={"Content-Type": kind})


def test_only_json_is_taken(server: Server) -> None:
    body = json.dumps(JOB).encode()
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        assert_error(post_raw(server, body, kind), 415, "not_json")
    assert post_raw(server, body, "application/json; charset=utf-8").status_code == 201
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    assert_error(server.http.post("/jobs/job_1/priority", content='{"priority": 1}', headers=form), 415, "not_json")


def test_a_text_is_no_file(server: Server) -> None:
    """As curl sends it without an @."""
    form = {"file": (None, "rows.jsonl"), "job": (None, json.dumps({"model": "model", "prompt": "{text}"}))}
    message = assert_error(server.http.post("/jobs/upload", files=form), 422, "invalid_value", "file")
    assert message == "file: a file is expected, with a filename, not 'rows.jsonl'"


@pytest.mark.parametrize("announced", [True, False])
def test_a_body_may_not_be_too_large(server: Server, announced: bool) -> None:
    body = b" " * (MAX_BODY_BYTES + 1)
    pieces = (body[start : start + 2**20] for start in range(0, len(body), 2**20))
    response = server.http.post(
        "/jobs", content=body if announced else pieces, headers={"Content-Type": "application/json"}
    )
    assert_error(response, 413, "body_too_large")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_live_request_may_be_less_large(server: Server, path: str) -> None:
    body = b" " * (4 * 2**20 + 1)
    response = server.http.post(path, content=body, headers={"Content-Type": "application/json"})
    message = assert_error(response, 413, "body_too_large")
    assert "larger than 4,194,304 bytes: images count" in message
    assert "/v1/batches" in message


@pytest.mark.parametrize("job_id", ["job_0123456789abcdef", "a%00b", "x" * 5000, "%F0%9F%98%80", "jobs;drop"])
def test_an_unknown_job(server: Server, job_id: str) -> None:
    assert_error(server.http.get(f"/jobs/{job_id}"), 404, "job_not_found", "job_id")
    assert_error(server.http.get(f"/jobs/{job_id}/results"), 404, "job_not_found", "job_id")
    assert_error(server.http.post(f"/jobs/{job_id}/cancel"), 404, "job_not_found", "job_id")


@pytest.mark.parametrize("query", ["limit=0", "limit=1001", "limit=x", "after_row=-1", f"after_row={2**63}"])
def test_a_page_that_is_none(server: Server, query: str) -> None:
    param = query.partition("=")[0]
    assert_error(server.http.get(f"/jobs/job_1/results?{query}"), 422, "invalid_value", param)


def test_unknown_routes_and_methods(server: Server) -> None:
    assert assert_error(server.http.get("/nothing"), 404, None) == "Invalid URL (GET /nothing)"
    assert assert_error(server.http.delete("/jobs"), 405, None) == "Invalid URL (DELETE /jobs)"


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("PUT", "/jobs", "GET, POST"),
        ("PATCH", "/jobs/job_1", "DELETE, GET"),
        ("POST", "/v1/files/file-1", "DELETE, GET"),
        ("DELETE", "/jobs/job_1/cancel", "POST"),
        ("OPTIONS", "/health", "GET, HEAD"),
    ],
)
def test_all_methods_of_a_path_are_named(server: Server, method: str, path: str, allowed: str) -> None:
    refused = server.http.request(method, path)
    assert_error(refused, 405, None)
    assert refused.headers["allow"] == allowed


@pytest.mark.parametrize("path", ["/nothing", "/jobs"])
def test_a_websocket_to_a_path_without_one(server: Server, path: str) -> None:
    with pytest.raises(InvalidStatus) as refused, connect(f"{server.http.base_url}".replace("http", "ws", 1) + path):
        pass
    answer = refused.value.response
    assert answer.status_code == 404
    assert json.loads(answer.body)["error"]["message"] == f"Invalid URL (WebSocket {path})"


def test_the_routes_are_described(server: Server) -> None:
    description = server.http.get("/openapi.json").json()
    assert set(description["paths"]) >= {"/health", "/ready", "/metrics", "/jobs", "/jobs/{job_id}", "/jobs/upload"}
    refused = description["paths"]["/jobs"]["post"]["responses"]["422"]["content"]["application/json"]
    assert refused["schema"] == {"$ref": "#/components/schemas/ErrorBody"}


def test_it_says_how_a_key_is_sent_and_where_too_much_is_refused(server: Server) -> None:
    """So that clients that are generated from it can send one."""
    description = server.http.get("/openapi.json").json()
    [(name, scheme)] = description["components"]["securitySchemes"].items()
    assert (scheme["type"], scheme["scheme"]) == ("http", "bearer")
    operations = {
        (method, path): each for path, methods in description["paths"].items() for method, each in methods.items()
    }
    # Until there is a key none is needed.
    secured = {path for (_, path), each in operations.items() if each.get("security") == [{name: []}, {}]}
    assert {path for _, path in operations} - secured == {"/health", "/ready", "/metrics"}
    counted = {path for (method, path), each in operations.items() if method == "post" and "429" in each["responses"]}
    live = {"/v1/chat/completions", "/v1/completions", "/v1/responses"}
    assert counted == live | {"/v1/batches", "/v1/files", "/jobs", "/jobs/upload"}


def test_every_route_is_described_with_its_errors(server: Server) -> None:
    described = server.http.get("/openapi.json")
    assert "HTTPValidationError" not in described.text
    for path, operations in described.json()["paths"].items():
        for operation in operations.values():
            assert operation["description"], path
            errors = {status: answer for status, answer in operation["responses"].items() if status >= "400"}
            assert path in ("/health", "/ready", "/metrics") or "401" in errors
            for answer in errors.values():
                schemas = [content["schema"]["$ref"] for content in answer["content"].values()]
                assert schemas == ["#/components/schemas/ErrorBody"] or path == "/ready"
