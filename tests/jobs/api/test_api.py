"""The HTTP API as its users meet it: a server process, a real Valkey, a real ledger, a real worker."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pyarrow as pa
import pytest
from fastapi.testclient import TestClient

from headrace import LLM, SamplingParams
from headrace.engine.errors import ModelError
from headrace.jobs.api.app import create_app
from headrace.jobs.api.models import ServedModels
from headrace.jobs.api.results import read_page
from headrace.jobs.api.server import _listen
from headrace.jobs.client import Client
from headrace.jobs.errors import SpecError
from headrace.jobs.settings import Settings
from headrace.storage.ledger import Ledger
from headrace.storage.parts import publish, write_part
from headrace.storage.records import JobState, NewJob, NewPart, NewShard

MAX_BODY_BYTES = 64 * 2**20
ROOT = Path(__file__).parents[3]
TICKETS = ROOT / "examples/tickets"
MODEL = TICKETS / "model"
LABELS = ["billing", "shipping", "refund", "account", "technical", "cancel", "product", "feedback"]
COMMAND = (sys.executable, "-P", "-m", "headrace.jobs.cli")
JOB: dict[str, Any] = {
    "model": "model",
    "rows": [{"text": "Where is my parcel?"}],
    "prompt": "{text}",
    "choices": LABELS,
}


@dataclass(frozen=True)
class Server:
    process: subprocess.Popen[str]
    http: httpx2.Client
    data_dir: Path

    def submit(self, **changes: Any) -> httpx2.Response:
        return self.http.post("/jobs", json=JOB | changes)

    def job(self, job_id: str) -> dict[str, Any]:
        return self.http.get(f"/jobs/{job_id}").raise_for_status().json()

    def stop(self, signum: signal.Signals = signal.SIGTERM) -> str:
        """In good order; returns what it has written to its log."""
        self.http.close()
        self.process.send_signal(signum)
        _, log = self.process.communicate(timeout=20)
        assert self.process.returncode == 0
        assert "Traceback" not in log
        return log


def environment(data_dir: Path, **settings: str) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    return (
        own
        | {"HEADRACE_DATA_DIR": str(data_dir), "HEADRACE_SHARD_ROWS": "8", "HEADRACE_FLUSH_SECONDS": "0.2"}
        | settings
    )


def start_server(data_dir: Path, **settings: str) -> Server:
    process = subprocess.Popen(
        [*COMMAND, "serve", "--model", MODEL, "--port", "0"],
        env=environment(data_dir, **settings),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    url = process.stdout.readline().removeprefix("headrace: listening on ").strip()
    return Server(process, httpx2.Client(base_url=url, timeout=30), data_dir)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose jobs nobody works on."""
    server = start_server(tmp_path_factory.mktemp("data"))
    yield server
    server.stop()


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[None]:
    with open(tmp_path / "worker.log", "w") as log:
        process = subprocess.Popen([*COMMAND, "worker", "--model", MODEL], env=environment(tmp_path), stderr=log)
    yield
    process.terminate()
    process.wait(20)


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    with Client(Settings.from_environment(environment(tmp_path))) as client:
        yield client


def tickets(folder: Path, count: int) -> list[dict[str, Any]]:
    file = folder / "tickets.jsonl"
    options = ["--split", "heldout", "--rows", str(count), "--seed", "7", "--output", str(file)]
    subprocess.run([sys.executable, TICKETS / "generate.py", *options], check=True, capture_output=True)
    return [json.loads(line) for line in file.read_text().splitlines()]


def labels_in_process(system: str, rows: list[dict[str, Any]]) -> list[str]:
    """What the model answers without a queue."""
    chats = [[{"role": "system", "content": system}, {"role": "user", "content": row["text"]}] for row in rows]
    outputs = LLM(TICKETS / "model").chat(chats, SamplingParams(temperature=0, choices=LABELS))
    return [output.outputs[0].text for output in outputs]


def assert_error(response: httpx2.Response, status: int, code: str | None, param: str | None = None) -> str:
    """The answer is an error as OpenAI's clients know it; returns the message."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    kind = "server_error" if status >= 500 else "invalid_request_error"
    assert error == {"message": error["message"], "type": kind, "param": param, "code": code}
    assert error["message"]
    assert "\n" not in error["message"]
    return error["message"]


def test_a_job_from_submission_to_its_results(
    tmp_path: Path, server: Server, worker: None, wait_until: Callable[..., None]
) -> None:
    own = start_server(tmp_path)
    try:
        rows = tickets(tmp_path, 20)
        request = JOB | {"rows": rows, "system": (TICKETS / "system.txt").read_text().strip()}
        created = own.http.post("/jobs", json=request)
        assert created.status_code == 201
        job = created.json()
        assert created.headers["Location"] == f"/jobs/{job['id']}"
        wait_until(lambda: own.job(job["id"])["state"] != "running", "the job has ended", seconds=40)
        job = own.job(job["id"])
        assert (job["state"], job["model"], job["error"]) == ("completed", "model", None)
        assert job["rows"] == {"total": 20, "done": 20, "failed": 0}
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
        assert not list(tmp_path.glob("inputs/*")) + list(tmp_path.glob("jobs/*"))
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


HALF_PAIR = "\ud800"
BAD_JOBS = {
    "no rows": ({"rows": []}, "rows"),
    "rows missing": ({"rows": None}, "rows"),
    "row is no object": ({"rows": [{"text": "a"}, "b"]}, "rows.1"),
    "no number": ({"rows": [{"text": float("nan")}]}, "rows.0.text"),
    "nested too deep": ({"rows": [{"text": json.loads("[" * 500 + "]" * 500)}]}, "rows.0.text"),
    "unknown field": ({"output": "/etc"}, "output"),
    "unknown dtype": ({"dtype": "int3"}, "dtype"),
    "unknown quantization": ({"quantization": "int3"}, "quantization"),
    "unknown sampling field": ({"sampling": {"temprature": 1}}, "sampling.temprature"),
    "max_tokens of zero": ({"sampling": {"max_tokens": 0}}, "sampling.max_tokens"),
    "stop that is no text": ({"sampling": {"stop": ["a", HALF_PAIR]}}, "sampling.stop"),
    "stop of the wrong type": ({"sampling": {"stop": 7}}, "sampling.stop"),
    "stop beside choices": ({"sampling": {"stop": "a"}}, "sampling.stop"),
    "text that is none": ({"system": HALF_PAIR}, "system"),
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
    "unknown column": ({"prompt": "{body}"}, None),
    "malformed template": ({"prompt": "{"}, None),
    "neither messages nor prompt": ({"prompt": None}, None),
}


@pytest.mark.parametrize(("changes", "param"), BAD_JOBS.values(), ids=BAD_JOBS)
def test_a_job_that_can_not_run_is_refused(server: Server, changes: dict[str, Any], param: str | None) -> None:
    before = sorted((server.data_dir / "outputs").glob("*"))
    response = post_raw(server, json.dumps(JOB | changes).encode())
    message = assert_error(response, 422, "invalid_value", param)
    assert "--" not in message
    assert sorted((server.data_dir / "outputs").glob("*")) == before
    assert not list((server.data_dir / "inputs").glob("*"))


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b'{"rows": ' + b"1" * 6000 + b"}", b"[" * 100_000])
def test_a_body_that_is_no_json(server: Server, body: bytes) -> None:
    response = post_raw(server, body)
    assert response.status_code == (400 if body else 422)
    assert response.json()["error"]["type"] == "invalid_request_error"


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


@pytest.mark.parametrize("announced", [True, False])
def test_a_body_may_not_be_too_large(server: Server, announced: bool) -> None:
    body = b" " * (MAX_BODY_BYTES + 1)
    pieces = (body[start : start + 2**20] for start in range(0, len(body), 2**20))
    response = server.http.post(
        "/jobs", content=body if announced else pieces, headers={"Content-Type": "application/json"}
    )
    assert_error(response, 413, "body_too_large")


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
    assert_error(server.http.get("/nothing"), 404, None)
    assert_error(server.http.delete("/jobs"), 405, None)


def test_the_routes_are_described(server: Server) -> None:
    description = server.http.get("/openapi.json").json()
    assert set(description["paths"]) >= {"/health", "/ready", "/metrics", "/jobs", "/jobs/{job_id}", "/jobs/upload"}
    refused = description["paths"]["/jobs"]["post"]["responses"]["422"]["content"]["application/json"]
    assert refused["schema"] == {"$ref": "#/components/schemas/ErrorBody"}


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


def test_ready_while_everything_answers(server: Server) -> None:
    assert server.http.get("/health").json() == {"status": "ok"}
    ready = server.http.get("/ready")
    assert (ready.status_code, ready.json()) == (200, {"ready": True, "ledger": "ok", "redis": "ok"})


def test_without_redis_it_is_up_but_not_ready_and_takes_no_job(tmp_path: Path) -> None:
    server = start_server(tmp_path, HEADRACE_REDIS_URL=f"unix://{tmp_path}/nothing.sock")
    try:
        assert server.http.get("/health").status_code == 200
        ready = server.http.get("/ready")
        assert (ready.status_code, ready.json()["ledger"]) == (503, "ok")
        assert "nothing.sock" in ready.json()["redis"]
        refused = server.submit()
        assert_error(refused, 503, "unavailable")
        assert refused.headers["Retry-After"]
        assert server.http.get("/jobs").json()["data"] == []
    finally:
        server.stop()


def test_without_its_ledger_it_is_up_but_not_ready(client: Client, tmp_path: Path) -> None:
    working = client.ledger
    client.ledger = Ledger(f"postgresql+psycopg://nobody@/none?host={tmp_path}")
    try:
        with TestClient(create_app(client, ServedModels.of([str(MODEL)]))) as http:
            assert http.get("/health").status_code == 200
            ready = http.get("/ready")
            assert (ready.status_code, ready.json()["redis"]) == (503, "ok")
            assert ready.json()["ledger"].startswith("ledger postgresql+psycopg://")
            assert_error(http.get("/jobs"), 503, "unavailable")
            assert_error(http.post("/jobs", json=JOB), 503, "unavailable")
    finally:
        client.ledger.close()
        client.ledger = working


def commit_part(ledger: Ledger, folder: Path, rows: pa.Table) -> None:
    """Some rows of a job of ten, as a worker would leave them midway."""
    ledger.create_job(NewJob("job_1", "queue", "/m", str(folder), "print", 10), [NewShard(0, 10, "/spool")])
    claim = ledger.claim("job_1/00000", "owner", 60)
    assert claim is not None
    folder.mkdir()
    write_part(folder, "part-00000-01-000.parquet", rows)
    ledger.commit_part(claim, NewPart("part-00000-01-000.parquet", rows.num_rows))
    publish(folder, "part-00000-01-000.parquet")


def test_results_are_readable_while_the_job_runs(client: Client, tmp_path: Path) -> None:
    commit_part(client.ledger, tmp_path / "out", pa.table({"row": [7, 2, 9, 4], "output": ["h", "c", "j", "e"]}))
    job = client.ledger.job("job_1")
    assert job.state is JobState.RUNNING
    first = read_page(client.ledger, job, None, 3)
    assert [(row["row"], row["output"]) for row in first.rows] == [(2, "c"), (4, "e"), (7, "h")]
    assert (first.last_row, first.has_more) == (7, True)
    second = read_page(client.ledger, job, first.last_row, 3)
    assert ([row["row"] for row in second.rows], second.has_more) == ([9], False)
    assert read_page(client.ledger, job, 9, 3).rows == []


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
    page = read_page(client.ledger, client.ledger.job("job_1"), None, 10)
    assert page.rows == [
        {
            "row": 0,
            "ratio": None,
            "scores": [1.5, None],
            "at": "2026-01-02 00:00:00+00:00",
            "probabilities": {"a": 0.5},
        }
    ]


def test_ctrl_c_leaves_nothing_running(tmp_path: Path, wait_until_ended: Callable[..., None]) -> None:
    server = start_server(tmp_path)
    valkey = psutil.Process(int((tmp_path / "valkey/server.pid").read_text()))
    assert server.submit().status_code == 201
    assert server.stop(signal.SIGINT) == ""
    wait_until_ended(valkey)


def test_answers_do_not_wait_for_the_acknowledgement_of_what_was_sent_before() -> None:
    with _listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_port_in_use_is_refused(server: Server, tmp_path: Path) -> None:
    options = ["--model", str(MODEL), "--port", str(server.http.base_url.port)]
    done = subprocess.run([*COMMAND, "serve", *options], env=environment(tmp_path), capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"headrace: cannot listen on 127.0.0.1 port {options[-1]}: Address already in use")


def test_folders_that_can_not_be_served_are_refused(tmp_path: Path) -> None:
    twin = tmp_path / "twin/model"
    twin.parent.mkdir()
    twin.symlink_to(MODEL)
    with pytest.raises(ModelError, match="does not exist"):
        ServedModels.of([str(tmp_path / "none")])
    with pytest.raises(ModelError, match=r"no config\.json"):
        ServedModels.of([str(MODEL), str(tmp_path)])
    with pytest.raises(SpecError, match="share a name"):
        ServedModels.of([str(MODEL), str(twin)])


def test_the_api_imports_no_torch() -> None:
    code = "import sys, headrace.jobs.api.server; print({'torch', 'triton', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "set()\n"
