"""Requests that do not say how they are sampled: as the model's authors would have it, unless the operator objects."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from headrace.engine.errors import ModelError
from headrace.jobs.api.app import create_app
from headrace.jobs.api.models import ServedModels
from headrace.jobs.api.openai.chat_schemas import ChatCompletionRequest
from headrace.jobs.api.openai.request_body import parse_body
from headrace.jobs.batches.files import FileStore
from headrace.jobs.batches.lines import CHAT, BatchLine
from headrace.jobs.batches.requests import RequestReader
from headrace.jobs.batches.validation import Validation
from headrace.jobs.client.client import Client
from headrace.jobs.spec.lora import parse_loras
from headrace.jobs.spec.sampling import SamplingSpec
from headrace.jobs.spec.schemas import JobSpec
from headrace.jobs.spec.stored import read_stored

from ....engine.lora.adapters import save_adapter
from ...batches.conftest import add_batch
from ...running import MODEL

QUESTION = "I was charged twice this month."
DEFAULTS: dict[str, Any] = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1}


@pytest.fixture
def advised(tmp_path: Path) -> Path:
    """The tickets' model, with its authors' advice."""
    folder = tmp_path / "advised"
    folder.mkdir()
    for file in MODEL.iterdir():
        if file.name != "generation_config.json":
            (folder / file.name).symlink_to(file)
    generation = json.loads((MODEL / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(generation | DEFAULTS))
    return folder


def sampling(defaults: dict[str, Any], **said: Any) -> SamplingSpec:
    messages = [{"role": "user", "content": "a"}]
    return parse_body(ChatCompletionRequest, {"model": "m", "messages": messages, **said}).sampling(9, 0, defaults)


def test_what_a_request_says_goes_before_what_the_model_says() -> None:
    assert sampling({}) == SamplingSpec(temperature=1.0, max_tokens=9)
    assert sampling(DEFAULTS) == SamplingSpec(max_tokens=9, **DEFAULTS)
    said = {"temperature": 0, "top_k": -1, "repetition_penalty": 1.0, "presence_penalty": 0.5}
    expected: dict[str, Any] = {"temperature": 0, "top_p": 0.9, "presence_penalty": 0.5}
    assert sampling(DEFAULTS, **said) == SamplingSpec(max_tokens=9, **expected)
    assert sampling(DEFAULTS, temperature=None) == sampling(DEFAULTS)


def test_an_advised_penalty_does_not_refuse_choices() -> None:
    assert sampling(DEFAULTS, guided_choice=["a", "b"]).repetition_penalty == 1.0


def test_served_models_have_their_authors_advice(advised: Path, tmp_path: Path) -> None:
    loras = parse_loras([f"kind={save_adapter(MODEL, tmp_path / 'kind')}"])
    assert [model.sampling_defaults for model in ServedModels.of([str(advised)], lora_modules=loras).all] == [
        DEFAULTS,
        DEFAULTS,
    ]
    (without,) = ServedModels.of([str(advised)], generation_config="vllm").all
    assert without.sampling_defaults == {}


def test_advice_that_can_not_be_taken_is_known_before_anything_is_served(tmp_path: Path, advised: Path) -> None:
    (advised / "generation_config.json").write_text('{"top_p": 7}')
    with pytest.raises(ModelError, match="top_p must be in"):
        ServedModels.of([str(advised)])
    assert ServedModels.of([str(advised)], generation_config="vllm").names


@pytest.fixture
def http(client: Client) -> Iterator[TestClient]:
    """Of a server that takes the advice not to draw from more than the likeliest token."""
    (served,) = ServedModels.of([str(MODEL)]).all
    models = ServedModels([replace(served, sampling_defaults={"temperature": 3.0, "top_k": 1})])
    with TestClient(create_app(client, models)) as http:
        yield http


def test_live_requests_are_sampled_so(http: TestClient) -> None:
    def answer(**said: Any) -> str:
        body = {"model": MODEL.name, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 12, **said}
        told = http.post("/v1/chat/completions", json=body).raise_for_status().json()
        return str(told["choices"][0]["message"]["content"])

    greedy = answer(temperature=0)
    assert {answer() for _ in range(4)} == {greedy}
    assert answer(top_k=-1, temperature=30.0) != greedy


def test_a_response_says_how_it_was_sampled(http: TestClient) -> None:
    body = {"model": MODEL.name, "input": QUESTION, "max_output_tokens": 2}
    told = http.post("/v1/responses", json=body).raise_for_status().json()
    assert (told["temperature"], told["top_p"]) == (3.0, 1.0)
    told = http.post("/v1/responses", json={**body, "temperature": 0.5, "top_p": 0.7}).raise_for_status().json()
    assert (told["temperature"], told["top_p"]) == (0.5, 0.7)


def test_a_batch_keeps_the_advice_that_it_was_begun_with(unserved: Client, advised: Path, tmp_path: Path) -> None:
    store = FileStore(tmp_path / "files", unserved.ledger.files, 10_000_000)
    models = ServedModels.of([str(advised)])
    validation = Validation(unserved, models, store)
    job = validation.run(add_batch(validation, 1, model=advised.name), lambda: None)
    spec = read_stored(JobSpec, job.spec)
    assert spec.sampling_defaults == DEFAULTS
    (advised / "generation_config.json").unlink()
    assert sampled_row(spec) == SamplingSpec(**DEFAULTS).model_dump(include=set(DEFAULTS))
    # As batches of before there was advice.
    older = read_stored(JobSpec, {name: value for name, value in job.spec.items() if name != "sampling_defaults"})
    assert sampled_row(older)["temperature"] == 1.0
    assert sampled_row(older)["top_k"] == 0


def sampled_row(spec: JobSpec) -> dict[str, Any]:
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
    row = RequestReader.of(CHAT, spec).row(0, BatchLine(1, "x", body))
    assert row.sampling is not None
    sampling: dict[str, Any] = json.loads(row.sampling)["sampling"]
    return {name: sampling.get(name, SamplingSpec.model_fields[name].default) for name in DEFAULTS}
