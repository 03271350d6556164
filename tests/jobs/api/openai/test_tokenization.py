"""`/tokenize` and `/detokenize`: what a prompt takes, as the answer to it says afterwards."""

from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from openai import OpenAI

from headrace.jobs.api.app import create_app
from headrace.jobs.api.models import ServedModels
from headrace.jobs.client.client import Client
from headrace.jobs.settings import Settings

from ...api_server import ApiServer
from ...running import MODEL, environment
from ..own_server import assert_error

TEXT = "Where is my parcel? Ünïcödé 😀"
CHAT: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": TEXT}]
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}


def test_a_text_has_the_tokens_of_its_completion(api: ApiServer, openai_client: OpenAI) -> None:
    found = api.post("/tokenize", model=api.model, prompt=TEXT)
    answer = openai_client.completions.create(model=api.model, prompt=found["tokens"], max_tokens=1)
    again = openai_client.completions.create(model=api.model, prompt=TEXT, max_tokens=1)
    assert found["count"] == len(found["tokens"]) == answer.usage.prompt_tokens == again.usage.prompt_tokens
    assert (found["max_model_len"], found["token_strs"]) == (2048, None)
    assert api.post("/detokenize", tokens=found["tokens"]) == {"prompt": TEXT}
    assert api.post("/tokenize", prompt="")["count"] == 0


def test_a_chat_has_those_of_its_answer(api: ApiServer, openai_client: OpenAI) -> None:
    for told in ({}, {"add_generation_prompt": False}, {"tools": [TOOL], "tool_choice": "none"}):
        found = api.post("/tokenize", messages=CHAT, return_token_strs=True, **told)
        answer = openai_client.chat.completions.create(model=api.model, messages=CHAT, max_tokens=1, extra_body=told)
        assert found["count"] == answer.usage.prompt_tokens
        assert len(found["token_strs"]) == found["count"]
        # Special tokens are in it, written by the template.
        assert (text := api.post("/detokenize", tokens=found["tokens"])["prompt"]).startswith(found["token_strs"][0])
        assert TEXT in text


@pytest.mark.parametrize(
    ("path", "body", "code", "param"),
    [
        ("/tokenize", {}, "invalid_value", "prompt"),
        ("/tokenize", {"prompt": "x", "messages": CHAT}, "invalid_value", "prompt"),
        ("/tokenize", {"messages": CHAT, "add_special_tokens": True}, "invalid_value", "add_special_tokens"),
        ("/tokenize", {"messages": [{"role": "user"}]}, "invalid_value", "messages[0]"),
        ("/tokenize", {"messages": CHAT, "tool_choice": "required"}, "invalid_value", "tool_choice"),
        ("/tokenize", {"prompt": "x", "truncate": 5}, "unknown_parameter", "truncate"),
        ("/tokenize", {"prompt": "x" * 10**6}, "context_length_exceeded", "prompt"),
        ("/detokenize", {"tokens": [5, 10**12]}, "invalid_value", "tokens"),
        ("/detokenize", {"tokens": [-1]}, "invalid_value", "tokens"),
        ("/detokenize", {"tokens": ["x"]}, "invalid_type", "tokens[0]"),
        ("/detokenize", {}, "missing_required_parameter", "tokens"),
    ],
)
def test_what_is_wrong_is_named(api: ApiServer, path: str, body: dict[str, Any], code: str, param: str) -> None:
    assert_error(api.http.post(path, json=body), 400, code, param)


def test_the_model_is_said_where_there_are_several(tmp_path: Path) -> None:
    (tmp_path / "other").symlink_to(MODEL)
    models = ServedModels.of([str(MODEL), str(tmp_path / "other")])
    with (
        Client(Settings.from_environment(environment(tmp_path / "data"))) as client,
        TestClient(create_app(client, models)) as http,
    ):
        said = assert_error(http.post("/tokenize", json={"prompt": "x"}), 400, "missing_required_parameter", "model")
        assert said == "say which model: model, other"
        assert_error(http.post("/detokenize", json={"tokens": [1], "model": "x"}), 404, "model_not_found", "model")
        assert http.post("/tokenize", json={"prompt": "x", "model": "other"}).json()["count"] == 1
        assert_error(http.post("/tokenize", content=b"{}"), 415, "not_json")
        large = {"Content-Type": "application/json"}
        assert_error(http.post("/tokenize", content=b" " * (4 * 2**20 + 1), headers=large), 413, "body_too_large")
