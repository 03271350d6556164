"""The server's process: whether it is ready, what it needs, and how it ends."""

import errno
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from fastapi.testclient import TestClient

from headrace.engine.errors import ModelError
from headrace.jobs.api import health
from headrace.jobs.api.app import create_app
from headrace.jobs.api.models import ServedModels
from headrace.jobs.api.server import _listen
from headrace.jobs.client.client import Client
from headrace.jobs.errors import SpecError
from headrace.jobs.settings import Settings
from headrace.storage.ledger.ledger import Ledger

from ..running import COMMAND, MODEL, environment
from .own_server import JOB, Server, assert_error, start_server


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    with Client(Settings.from_environment(environment(tmp_path))) as client:
        yield client


def test_ready_while_everything_answers(server: Server, wait_until: Callable[..., None]) -> None:
    assert server.http.get("/health").json() == {"status": "ok"}

    def is_ready() -> bool:
        ready = server.http.get("/ready")
        return (ready.status_code, ready.json()) == (200, {"ready": True, "ledger": "ok", "redis": "ok"})

    # On a machine that is busy with others an answer may take longer than it is waited for.
    wait_until(is_ready, "both have answered in time")


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_a_probe_may_want_no_body(server: Server, path: str) -> None:
    head = server.http.head(path)
    # A busy machine may be late with whether it is ready.
    assert head.status_code in (200, 503)
    assert head.content == b""


def test_without_redis_it_is_up_but_not_ready_and_takes_no_job(tmp_path: Path, wait_until: Callable[..., None]) -> None:
    server = start_server(tmp_path, HEADRACE_REDIS_URL=f"unix://{tmp_path}/nothing.sock")
    try:
        assert server.http.get("/health").status_code == 200

        def says_what_is_missing() -> bool:
            ready = server.http.get("/ready")
            assert ready.status_code == 503
            return ready.json()["ledger"] == "ok" and "nothing.sock" in ready.json()["redis"]

        wait_until(says_what_is_missing, "the ledger is ready, Redis is not there")
        refused = server.submit()
        assert_error(refused, 503, "unavailable")
        assert refused.headers["Retry-After"]
        assert server.http.get("/jobs").json()["data"] == []
    finally:
        server.stop()


def test_without_room_for_its_rows_a_job_is_refused_and_leaves_nothing(client: Client) -> None:
    client.jobs_folder.parent.mkdir(parents=True, exist_ok=True)
    client.jobs_folder.touch()
    with TestClient(create_app(client, ServedModels.of([str(MODEL)]))) as http:
        assert_error(http.post("/jobs", json=JOB), 507, "storage_full")
        assert http.get("/jobs").json()["data"] == []
        assert list((client.settings.data_dir / "outputs").iterdir()) == []
        inputs = client.settings.data_dir / "inputs"
        assert list(inputs.iterdir()) == []
        inputs.rmdir()
        inputs.touch()
        assert_error(http.post("/jobs", json=JOB), 507, "storage_full")
        options, file = '{"model": "model", "prompt": "{text}"}', ("a.jsonl", b'{"text": "a"}')
        sent = http.post("/jobs/upload", data={"job": options}, files={"file": file})
        assert_error(sent, 507, "storage_full")
    client.jobs_folder.unlink()


def test_a_job_that_is_queued_keeps_its_folder_whatever_fails_then(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = client.ledger.create_job

    def create_and_fail(*job: Any) -> None:
        create(*job)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(client.ledger, "create_job", create_and_fail)
    with TestClient(create_app(client, ServedModels.of([str(MODEL)]))) as http:
        created = http.post("/jobs", json=JOB)
        assert created.status_code == 201
        assert [job["id"] for job in http.get("/jobs").json()["data"]] == [created.json()["id"]]
    assert (client.settings.data_dir / "outputs" / created.json()["id"] / "_headrace.json").exists()


def test_without_its_ledger_it_is_up_but_not_ready(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "_PATIENCE_SECONDS", 60.0)
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


def test_ctrl_c_leaves_nothing_running(tmp_path: Path, wait_until_ended: Callable[..., None]) -> None:
    server = start_server(tmp_path)
    try:
        valkey = psutil.Process(int((tmp_path / "valkey/server.pid").read_text()))
        assert server.submit().status_code == 201
        assert server.stop(signal.SIGINT) == ""
        wait_until_ended(valkey)
    finally:
        server.process.kill()


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
    refusal = f"cannot listen on 127.0.0.1 port {options[-1]}: Address already in use; choose with --host and --port"
    assert line == f"headrace: {refusal}"


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
