"""Jobs over HTTP as their users meet them: a server process, a real Valkey, a real ledger, a real worker."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from headrace import LLM, SamplingParams
from headrace.jobs.api.models import ServedModels
from headrace.jobs.api.service import JobService
from headrace.jobs.client.client import Client
from headrace.jobs.settings import Settings
from headrace.storage.ledger.ledger import Ledger
from headrace.storage.ledger.records import JobState, NewJob, NewPart, NewShard
from headrace.storage.output.local_folder import LocalFolder

from ...storage.ledger.claiming import take_shard
from ..running import COMMAND, LABELS, MODEL, ROOT, environment
from .own_server import JOB, Server, assert_error, start_server


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[None]:
    with open(tmp_path / "worker.log", "w") as log:
        process = subprocess.Popen([*COMMAND, "worker", "--model", MODEL], env=environment(tmp_path), stderr=log)
    yield
    process.terminate()
    process.wait(60)


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    with Client(Settings.from_environment(environment(tmp_path))) as client:
        yield client


def tickets(folder: Path, count: int) -> list[dict[str, Any]]:
    file = folder / "tickets.jsonl"
    options = ["--split", "heldout", "--rows", str(count), "--seed", "7", "--output", str(file)]
    subprocess.run([sys.executable, ROOT / "examples/tickets/generate.py", *options], check=True, capture_output=True)
    return [json.loads(line) for line in file.read_text().splitlines()]


def labels_in_process(system: str, rows: list[dict[str, Any]]) -> list[str]:
    """What the model answers without a queue."""
    chats = [[{"role": "system", "content": system}, {"role": "user", "content": row["text"]}] for row in rows]
    outputs = LLM(MODEL).chat(chats, SamplingParams(temperature=0, choices=LABELS))
    return [output.outputs[0].text for output in outputs]


def test_a_job_from_submission_to_its_results(
    tmp_path: Path, server: Server, worker: None, wait_until: Callable[..., None]
) -> None:
    own = start_server(tmp_path)
    try:
        rows = tickets(tmp_path, 20)
        request = JOB | {"rows": rows, "system": (ROOT / "examples/tickets/system.txt").read_text().strip()}
        created = own.http.post("/jobs", json=request)
        assert created.status_code == 201
        job = created.json()
        assert created.headers["Location"] == f"/jobs/{job['id']}"
        wait_until(lambda: own.job(job["id"])["state"] != "running", "the job has ended")
        job = own.job(job["id"])
        assert (job["state"], job["model"], job["error"]) == ("completed", "model", None)
        assert job["rows"] == {"total": 20, "done": 20, "failed": 0, "from_cache": 0, "truncated": 0}
        assert job["shards"] == {"total": 3, "done": 3}
        assert job["created_at"] <= job["started_at"] <= job["finished_at"]
        assert job["rows_per_second"] == pytest.approx(20 / (job["finished_at"] - job["started_at"]), rel=1e-2)
        answers = read_all(own, job["id"], limit=7)
        assert [answer["row"] for answer in answers] == list(range(20))
        assert [answer["text"] for answer in answers] == [row["text"] for row in rows]
        assert [answer["label"] for answer in answers] == labels_in_process(request["system"], rows)
        for answer in answers:
            assert sum(answer["probabilities"].values()) == pytest.approx(1)
            assert answer["confidence"] == max(answer["probabilities"].values())
        prompt, cached = (sum(answer[f"{kind}_tokens"] for answer in answers) for kind in ("prompt", "cached"))
        assert job["tokens"] == {
            "prompt": prompt,
            "cached": cached,
            "completion": sum(answer["completion_tokens"] for answer in answers),
            "cached_share": pytest.approx(cached / prompt, abs=1e-4),
        }
        # Two servers side by side: each with its own jobs.
        assert own.http.base_url != server.http.base_url
        assert_error(server.http.get(f"/jobs/{job['id']}"), 404, "job_not_found", "job_id")
        # What was spooled is gone, and the answers lie where no client has chosen.
        wait_until(lambda: not [*tmp_path.glob("inputs/*"), *tmp_path.glob("jobs/*")], "it is gone")
        assert list((tmp_path / "outputs" / job["id"]).glob("part-*.parquet"))
    finally:
        own.stop()


def read_all(server: Server, job_id: str, limit: int) -> list[dict[str, Any]]:
    """All results, page by page."""
    rows: list[dict[str, Any]] = []
    after: dict[str, int] = {}
    while True:
        page = server.http.get(f"/jobs/{job_id}/results", params={"limit": limit, **after}).raise_for_status().json()
        assert len(page["data"]) <= limit
        rows += page["data"]
        if not page["has_more"]:
            return rows
        after = {"after_row": page["last_row"]}


def test_jobs_are_listed_newest_first(server: Server) -> None:
    ids = [server.submit().json()["id"] for _ in range(3)]
    listed = server.http.get("/jobs", params={"limit": 2}).json()
    assert listed["object"] == "list"
    assert [job["id"] for job in listed["data"]] == ids[:0:-1]


def test_a_cancelled_job_stays_cancelled(server: Server) -> None:
    job_id = server.submit().json()["id"]
    for _ in range(2):
        answer = server.http.post(f"/jobs/{job_id}/cancel")
        assert (answer.status_code, answer.json()["state"]) == (200, "cancelled")
    assert server.http.get(f"/jobs/{job_id}/results").json() == {
        "object": "list",
        "state": "cancelled",
        "data": [],
        "last_row": None,
        "has_more": False,
    }


def test_a_model_may_be_named_by_its_folder_and_only_one_that_is_served(server: Server) -> None:
    assert server.submit(model=str(MODEL)).json()["model"] == "model"
    for model in ("gpt-5", str(MODEL.parent), "../model", "", "\0"):
        message = assert_error(server.submit(model=model), 404, "model_not_found", "model")
        assert str(ROOT) not in message.replace(str(MODEL.parent), "")


def commit_part(ledger: Ledger, folder: Path, rows: pa.Table) -> None:
    """Some rows of a job of ten, as a worker would leave them midway."""
    ledger.create_job(NewJob("job_1", "queue", "/m", str(folder), "print", 10), [NewShard(0, 10, "/spool")])
    claim = take_shard(ledger, "job_1/00000", "owner", 60)
    assert claim is not None
    folder.mkdir()
    LocalFolder(folder).write_part("part-00000-01-000.parquet", rows)
    ledger.leases.commit_part(claim, NewPart("part-00000-01-000.parquet", rows.num_rows))
    LocalFolder(folder).publish("part-00000-01-000.parquet")


def test_results_are_readable_while_the_job_runs(client: Client, tmp_path: Path) -> None:
    commit_part(client.ledger, tmp_path / "out", pa.table({"row": [7, 2, 9, 4], "output": ["h", "c", "j", "e"]}))
    service = JobService(client, ServedModels.of([str(MODEL)]))
    first = service.results("job_1", None, 3)
    assert first.state is JobState.RUNNING
    assert [(row["row"], row["output"]) for row in first.data] == [(2, "c"), (4, "e"), (7, "h")]
    assert (first.last_row, first.has_more) == (7, True)
    second = service.results("job_1", first.last_row, 3)
    assert ([row["row"] for row in second.data], second.has_more) == ([9], False)
    assert service.results("job_1", 9, 3).data == []


def test_results_that_json_has_no_word_for(client: Client, tmp_path: Path) -> None:
    rows = pa.table(
        {
            "row": [0],
            "ratio": [float("nan")],
            "scores": [[1.5, float("inf")]],
            "at": [datetime(2026, 1, 2, tzinfo=UTC)],
            "probabilities": pa.array([[("a", 0.5)]], pa.map_(pa.string(), pa.float64())),
        }
    )
    commit_part(client.ledger, tmp_path / "out", rows)
    page = JobService(client, ServedModels.of([str(MODEL)])).results("job_1", None, 10)
    assert page.data == [
        {
            "row": 0,
            "ratio": None,
            "scores": [1.5, None],
            "at": "2026-01-02 00:00:00+00:00",
            "probabilities": {"a": 0.5},
        }
    ]
