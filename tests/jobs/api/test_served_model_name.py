"""`--served-model-name`: what requests call the model, such as the name that is written in their program."""

from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from headrace.jobs.api.app import create_app
from headrace.jobs.api.models import ServedModels
from headrace.jobs.client.client import Client
from headrace.jobs.errors import SpecError
from headrace.jobs.spec.lora import parse_loras

from ...engine.lora.adapters import save_adapter
from ..running import MODEL

NAME = "gpt-4o-mini"
QUESTION = {"messages": [{"role": "user", "content": "Where is it?"}], "max_tokens": 2}


def test_requests_and_answers_have_it(client: Client) -> None:
    with TestClient(create_app(client, ServedModels.of([str(MODEL)], served_model_name=NAME))) as http:
        assert [model["id"] for model in http.get("/v1/models").json()["data"]] == [NAME]
        answer = http.post("/v1/chat/completions", json={"model": NAME, **QUESTION}).raise_for_status().json()
        assert answer["model"] == NAME
        assert answer["choices"][0]["message"]["content"]
        refused = http.post("/v1/chat/completions", json={"model": MODEL.name, **QUESTION})
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")


def test_jobs_and_adapters_have_it(unserved: Client, tmp_path: Path) -> None:
    loras = parse_loras([f"kind={save_adapter(MODEL, tmp_path / 'kind')}"])
    models = ServedModels.of([str(MODEL)], served_model_name=NAME, lora_modules=loras)
    job = {"rows": [{"text": "Where is it?"}], "prompt": "{text}", "sampling": {"max_tokens": 2}}
    with TestClient(create_app(unserved, models)) as http:
        parents = {model["id"]: model["parent"] for model in http.get("/v1/models").json()["data"]}
        assert parents == {NAME: None, "kind": NAME}
        for name in (NAME, "kind"):
            asked = http.post("/jobs", json={"model": name, **job}).raise_for_status().json()
            assert asked["model"] == http.get(f"/jobs/{asked['id']}").json()["model"] == name
        assert {queue["model"] for queue in http.get("/status").json()["queues"]} == {NAME}


def test_it_is_for_one_model() -> None:
    with pytest.raises(SpecError, match="gpt-4o-mini is for one model"):
        ServedModels.of([str(MODEL), "org/other"], served_model_name=NAME)


def test_it_has_to_say_something() -> None:
    with pytest.raises(SpecError, match="is empty: leave it out, or say what requests call the model"):
        ServedModels.of([str(MODEL)], served_model_name="")
