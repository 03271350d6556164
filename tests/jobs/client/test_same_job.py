"""Jobs that are one and the same: those of one idempotency key, and one that several processes submit or resume."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import pytest
from fastapi.testclient import TestClient

from headrace.jobs.api.app import create_app
from headrace.jobs.api.models import ServedModels
from headrace.jobs.errors import JobMismatchError
from headrace.jobs.planning.producer import Producer
from headrace.storage.output import held_file
from headrace.storage.output.address import open_folder
from headrace.storage.output.manifest import read_manifest

from ..running import LABELS, MODEL

FAST: dict[str, Any] = {"prompt": "{text}", "choices": LABELS}
ROWS = [{"text": f"Where is parcel {number}?"} for number in range(80)]


def test_the_same_key_is_the_same_job(unserved, tmp_path):
    first = unserved.submit(ROWS, MODEL, tmp_path / "one", idempotency_key="nightly", **FAST)
    again = unserved.submit(ROWS, MODEL, tmp_path / "two", idempotency_key="nightly", **FAST)
    assert again.id == first.id
    assert not (tmp_path / "two").exists()
    with pytest.raises(JobMismatchError, match=r"'nightly' belongs to job job_\w+ with another prompt"):
        unserved.submit(
            ROWS, MODEL, tmp_path / "two", idempotency_key="nightly", prompt="Ticket: {text}", choices=LABELS
        )
    other = unserved.submit(ROWS, MODEL, tmp_path / "two", idempotency_key="daily", **FAST)
    assert other.id != first.id


def test_a_key_does_not_drop_other_terms_in_silence(unserved, tmp_path):
    terms = {"webhook": "https://example.com/a", "sink": f"sqlite:///{tmp_path}/answers.db"}

    def submit(output, **changes):
        return unserved.submit(ROWS, MODEL, output, idempotency_key="nightly", **FAST, **{**terms, **changes})

    first = submit(tmp_path / "one")
    assert submit(tmp_path / "two", priority=3, within_seconds=60).id == first.id
    for name, other in (("webhook", "https://example.com/b"), ("sink", f"sqlite:///{tmp_path}/others.db")):
        for value in (other, None):
            with pytest.raises(JobMismatchError, match=f"belongs to job {first.id} with another {name}: choose"):
                submit(tmp_path / "two", **{name: value})
    assert not (tmp_path / "two").exists()


def test_http_clients_may_send_a_key(unserved):
    body = {"model": "model", "rows": ROWS[:2], "prompt": "{text}", "choices": LABELS}
    with TestClient(create_app(unserved, ServedModels.of([str(MODEL)]))) as http:
        answers = [http.post("/jobs", json=body, headers={"Idempotency-Key": "nightly"}) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [201, 201]
        assert answers[0].json()["id"] == answers[1].json()["id"]
        other = http.post("/jobs", json=body | {"rows": ROWS[:3]}, headers={"Idempotency-Key": "nightly"})
        assert (other.status_code, other.json()["error"]["code"]) == (409, "idempotency_key_reused")
        assert len(http.get("/jobs").json()["data"]) == 1
    assert len(list((unserved.settings.data_dir / "outputs").iterdir())) == 1


def test_two_that_come_with_one_key_at_the_same_time_are_one_job(unserved, tmp_path):
    start = threading.Barrier(2)

    def submit(name: str) -> str:
        start.wait(60)
        return unserved.submit(ROWS, MODEL, tmp_path / name, idempotency_key="nightly", **FAST).id

    with ThreadPoolExecutor(2) as pool:
        ids = set(pool.map(submit, ("one", "two")))
    assert len(ids) == 1
    assert [job.id for job in unserved.jobs()] == list(ids)
    assert [path.name for path in unserved.jobs_folder.iterdir()] == list(ids)
    assert sum(path.exists() for path in (tmp_path / "one", tmp_path / "two")) == 1


@pytest.fixture
def begun(unserved, tmp_path, monkeypatch):
    """An output folder that was taken for a job whose submitter was killed before it was recorded."""
    with monkeypatch.context() as patch:
        patch.setattr(Producer, "_create", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            unserved.submit(ROWS, MODEL, tmp_path / "out", **FAST)
    return tmp_path / "out"


def test_two_that_resume_a_job_at_the_same_time_plan_it_once(unserved, begun):
    """The second one would remove the shards of the first, whose workers may have begun with them."""
    start = threading.Barrier(2)

    def resume(number: int) -> str:
        start.wait(60)
        return unserved.submit(ROWS, MODEL, begun, mode="resume", **FAST).id

    with ThreadPoolExecutor(2) as pool:
        ids = set(pool.map(resume, range(2)))
    assert [job.id for job in unserved.jobs()] == list(ids)
    assert [path.name for path in unserved.jobs_folder.iterdir()] == list(ids)


def test_a_job_that_another_process_is_submitting_is_not_resumed(unserved, begun, monkeypatch):
    manifest = read_manifest(open_folder(begun))
    assert manifest is not None
    monkeypatch.setattr(held_file, "_PATIENCE_SECONDS", 0.1)
    with (
        held_file.held_lock(unserved.jobs_folder / f"{manifest.job_id}.lock"),
        pytest.raises(JobMismatchError, match="is being submitted by another process: wait until it has been, then"),
    ):
        unserved.submit(ROWS, MODEL, begun, mode="resume", **FAST)
    assert unserved.submit(ROWS, MODEL, begun, mode="resume", **FAST).id == manifest.job_id
