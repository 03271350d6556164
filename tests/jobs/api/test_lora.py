"""LoRA adapters as models of their own: in the list, in live requests, in jobs and batches, on the command line."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from headrace import LLM, Client, LoRARequest, SamplingParams
from headrace.engine.errors import ModelError
from headrace.jobs.api.app import create_app
from headrace.jobs.api.models import ServedModels
from headrace.jobs.batches.keeper import BatchKeeper
from headrace.jobs.errors import SpecError
from headrace.jobs.settings import Settings
from headrace.jobs.spec.lora import parse_loras

from ...engine.lora.adapters import save_adapter
from ..conftest import wait_until
from ..running import MODEL, Result, assert_refused, environment, results, write_lines

TEXTS = ("Where is my parcel?", "I was charged twice.", "The app crashes.")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("loras")
    return {
        name: save_adapter(MODEL, folder / name, alpha=40.0, seed=seed) for seed, name in enumerate(("terse", "kind"))
    }


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> dict[str, list[str]]:
    """What each adapter, and the model without any, answers to each text."""
    llm = LLM(MODEL, enable_lora=True, num_gpu_blocks_override=200)
    chats = [[{"role": "user", "content": text}] for text in TEXTS]
    params = SamplingParams(temperature=0, max_tokens=12)

    def answers(lora: LoRARequest | None) -> list[str]:
        return [output.outputs[0].text for output in llm.chat(chats, params, lora_request=lora)]

    named = {name: answers(LoRARequest(name, 1, str(folder))) for name, folder in folders.items()}
    expected = {MODEL.name: answers(None), **named}
    assert len(set(map(str, expected.values()))) == 3
    return expected


@pytest.fixture(scope="module")
def models(folders: dict[str, Path]) -> ServedModels:
    loras = parse_loras(f"{name}={folder}" for name, folder in folders.items())
    return ServedModels.of([str(MODEL)], lora_modules=loras)


@pytest.fixture(scope="module")
def http(served: Path, models: ServedModels) -> Iterator[TestClient]:
    """A server with the adapters, whose requests the session's worker answers."""
    with (
        Client(Settings.from_environment(environment(served))) as client,
        TestClient(create_app(client, models)) as http,
    ):
        yield http


def chat(model: str, text: str) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 12}


def test_the_list_of_models(http):
    listed = [(model["id"], model["parent"]) for model in http.get("/v1/models").json()["data"]]
    assert listed == [(MODEL.name, None), ("terse", MODEL.name), ("kind", MODEL.name)]
    assert http.get("/v1/models/kind").json()["parent"] == MODEL.name


def test_chats(http, expected):
    for name, answers in expected.items():
        for text, answer in zip(TEXTS, answers, strict=True):
            body = http.post("/v1/chat/completions", json=chat(name, text)).raise_for_status().json()
            assert (body["model"], body["choices"][0]["message"]["content"]) == (name, answer)


def test_a_batch_has_the_fingerprint_of_a_chat(http, client, models):
    """Of the adapter: with another one a seed gives other answers."""

    def posted(path: str, **body: Any) -> dict[str, Any]:
        return http.post(path, **body).raise_for_status().json()

    def in_a_batch(asked: dict[str, Any]) -> dict[str, Any]:
        line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": asked}
        file = posted("/v1/files", files={"file": ("lines.jsonl", json.dumps(line))}, data={"purpose": "batch"})
        batch = {"input_file_id": file["id"], "endpoint": line["url"], "completion_window": "1h"}
        path = f"/v1/batches/{posted('/v1/batches', json=batch)['id']}"
        wait_until(lambda: http.get(path).json()["output_file_id"] is not None, "it has an output")
        return http.get(f"/v1/files/{http.get(path).json()['output_file_id']}/content").json()["response"]["body"]

    fingerprints = set()
    with BatchKeeper.of(client, models):
        for name in (MODEL.name, "kind"):
            live, batched = posted("/v1/chat/completions", json=chat(name, TEXTS[0])), in_a_batch(chat(name, TEXTS[0]))
            assert batched["system_fingerprint"] == live["system_fingerprint"]
            assert batched["choices"] == live["choices"]
            fingerprints.add(live["system_fingerprint"])
    assert len(fingerprints) == 2


def test_a_name_that_nobody_has(http):
    refused = http.post("/v1/chat/completions", json=chat("rude", "x"))
    assert refused.status_code == 404
    assert refused.json()["error"]["code"] == "model_not_found"
    assert "terse, kind" in refused.json()["error"]["message"]


def test_a_job_and_the_cache_of_results(http, client, expected):
    """An adapter's answers are kept apart from its model's and from another one's."""
    options = {"prompt": "{text}", "sampling": {"max_tokens": 12}, "cache": True}
    rows = [{"text": text} for text in TEXTS]
    identities = set()
    for name, answers in expected.items():
        job = http.post("/jobs", json={"model": name, "rows": rows, **options}).raise_for_status().json()
        assert job["model"] == name
        client.job(job["id"]).wait(60, start_worker=False)
        table = client.job(job["id"]).results()
        assert table["output"].to_pylist() == answers
        assert not any(table["from_cache"].to_pylist())
        identities.add(client.job(job["id"]).record.weights)
    assert len(identities) == 3
    again = http.post("/jobs", json={"model": "kind", "rows": rows, **options}).raise_for_status().json()
    client.job(again["id"]).wait(60, start_worker=False)
    assert all(client.job(again["id"]).results()["from_cache"].to_pylist())


def test_from_python(client, folders, expected):
    lora = LoRARequest("kind", 1, str(folders["kind"]))
    generated = client.generate(TEXTS[0], MODEL, temperature=0, max_tokens=12, lora_request=lora, start_worker=False)
    assert generated.text == expected["kind"][0]


def test_a_worker_says_which_adapter_it_cannot_hold(client, tmp_path):
    """And leaves its rows to others."""
    lora = LoRARequest("large", 1, str(save_adapter(MODEL, tmp_path / "large", rank=17)))
    job = client.submit([{"text": "x"}], MODEL, tmp_path / "out", prompt="{text}", max_tokens=4, lora_request=lora)
    wait_until(lambda: job.progress().error is not None or job.progress().state.has_ended, "it was tried")
    progress = job.progress()
    assert "a worker cannot hold its adapter" in (progress.error or "")
    assert (progress.rows_done, progress.state.has_ended) == (0, False)
    job.cancel()


def test_from_the_command_line(
    headrace: Callable[..., Result], served: Path, folders: dict[str, Path], expected, tmp_path
):
    rows = write_lines(tmp_path / "rows.jsonl", *({"text": text} for text in TEXTS))
    output = tmp_path / "out"
    command = ["run", rows, "--model", MODEL, "--prompt", "{text}", "--max-tokens", "12", "--output", output]
    lora = ["--lora", f"kind={folders['kind']}"]
    assert headrace(served, *command, *lora).status == 0
    assert results(output)["output"].to_pylist() == expected["kind"]
    # The same again, verified with the adapter; and not the same job without it.
    verified = headrace(served, "verify", output)
    assert verified.status == 0, verified
    assert_refused(headrace(served, *command, "--resume"), "lora")
    assert_refused(headrace(served, *command, "--overwrite", "--lora", "kind=/nowhere"), "/nowhere", "does not exist")
    assert_refused(headrace(served, *command, "--overwrite", "--lora", "kind"), "--lora must be NAME=FOLDER")


def test_adapters_that_no_server_takes(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = str(folders["kind"])
    with pytest.raises(SpecError, match="'kind' twice"):
        parse_loras([f"kind={folder}", f"kind={folder}"])
    for text, message in (
        (f"{MODEL.name}={folder}", "has the name of a model"),
        (f'{{"name": "a", "path": "{folder}", "base_model_name": "other"}}', "which model it adapts"),
    ):
        with pytest.raises(SpecError, match=message):
            ServedModels.of([str(MODEL)], lora_modules=parse_loras([text]))
    with pytest.raises(ModelError, match=r"has no adapter_config\.json"):
        ServedModels.of([str(MODEL)], lora_modules=parse_loras([f"a={tmp_path}"]))
    named = parse_loras([f'{{"name": "a", "path": "{folder}", "base_model_name": "{MODEL.name}"}}'])
    assert ServedModels.of([str(MODEL)], lora_modules=named).model("a").lora == named[0].module
