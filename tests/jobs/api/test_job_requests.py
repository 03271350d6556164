"""What a job that comes over HTTP asks for."""

import socket
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from headrace.jobs.api.app import create_app
from headrace.jobs.api.job_requests import JobRequest, SinkRequest
from headrace.jobs.api.models import ServedModels
from headrace.jobs.client.client import Client
from headrace.jobs.errors import SpecError
from headrace.jobs.settings import Settings
from headrace.jobs.spec.schemas import JobSpec

from ..running import MODEL, environment


def test_what_is_not_said_depends_on_the_rest():
    served = ServedModels.of([str(MODEL)]).all[0]
    wanted = {}
    for sampling in ({}, {"reasoning": True}, {"reasoning": True, "thinking_token_budget": 50}, {"max_tokens": 7}):
        asked = JobRequest.model_validate({"model": served.name, "rows": [{"text": "x"}], "sampling": sampling})
        wanted[str(sampling)] = JobSpec.parse(**asked.of_spec(served)).sampling.max_tokens
    assert list(wanted.values()) == [256, 32_768, 306, 7]


@pytest.mark.parametrize(
    "option", ["host=127.0.0.1&port={port}", "host=127.0.0.1:{port}", "hostaddr=127.0.0.1&port={port}"]
)
def test_a_sink_leads_where_its_url_seems_to(tmp_path: Path, option: str) -> None:
    """What stands behind the question mark could name another database, which only the server can reach."""
    settings = Settings.from_environment(environment(tmp_path, HEADRACE_SINK_URLS="postgresql://db.invalid/"))
    with socket.create_server(("127.0.0.1", 0)) as listener, Client(settings) as client:
        url = f"postgresql://u:p@db.invalid/rows?{option.format(port=listener.getsockname()[1])}"
        with TestClient(create_app(client, ServedModels.of([str(MODEL)]))) as http:
            job = {"model": MODEL.name, "rows": [{"text": "x"}], "prompt": "{text}", "sink": {"url": url}}
            answer = http.post("/jobs", json=job)
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert answer.status_code == 422
    assert "sink.url must not say" in answer.json()["error"]["message"]


def test_a_sink_that_does_not_answer_is_tried_again_later(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        closed = f"postgresql://127.0.0.1:{listener.getsockname()[1]}/"
    wrong = "postgresql://db.invalid/"
    settings = Settings.from_environment(environment(tmp_path, HEADRACE_SINK_URLS=f"{closed},{wrong}"))
    with Client(settings) as client, TestClient(create_app(client, ServedModels.of([str(MODEL)]))) as http:
        job = {"model": MODEL.name, "rows": [{"text": "x"}], "prompt": "{text}"}
        away, refused = (http.post("/jobs", json=job | {"sink": {"url": f"{url}rows"}}) for url in (closed, wrong))
    assert (away.status_code, away.headers["retry-after"]) == (503, "5")
    error = away.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("server_error", "unavailable", "sink.url")
    assert error["message"].startswith("sink postgresql")
    assert error["message"].endswith("try again later")
    assert (refused.status_code, refused.json()["error"]["code"]) == (422, "invalid_value")
    assert list(tmp_path.glob("outputs/*")) == []


@pytest.mark.parametrize(
    "option", ["passfile=/a", "service=x", "sslkey=/a", "sslrootcert=/a", "port=1", "dbname=x", "requirepeer=root"]
)
def test_a_sink_names_no_file_and_no_service_of_the_servers(option: str) -> None:
    with pytest.raises(SpecError, match=f"must not say '{option.partition('=')[0]}'"):
        SinkRequest(url=f"postgresql://db.invalid/rows?sslmode=require&{option}").spec(("postgresql://db.invalid/",))


def test_a_sink_may_say_how_it_is_spoken_to() -> None:
    url = "postgresql://u:p@db.invalid/rows?sslmode=require&options=-csearch_path%3Dlabels"
    assert SinkRequest(url=url).spec(("postgresql://db.invalid/",)).options == {"sslmode", "options"}
