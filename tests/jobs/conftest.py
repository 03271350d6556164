"""What the tests of the queue side share: waiting, and user processes of an embedded Valkey."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from openai import OpenAI

from headrace import LLM
from headrace.jobs.broker.celery_app import shard_queue
from headrace.jobs.broker.redis_access import redis_server
from headrace.jobs.cli import main
from headrace.jobs.client.client import Client
from headrace.jobs.settings import Settings
from headrace.jobs.spec.precision import Precision
from headrace.jobs.workers import presence as presence_module
from headrace.jobs.workers.presence import WorkerPresence
from headrace.storage.ledger import leases

from ..ledgers import new_ledger
from ..shelf import install_for_workers
from .answers import GatedRunner, hosted
from .api_server import SETTINGS, ApiServer, start_api, stop_api
from .models import write_model_folder
from .running import MODEL, Result, environment, started, write_tickets
from .shop import Shop

USER = Path(__file__).with_name("valkey_user.py")


def wait_until(condition: Callable[[], bool], description: str, seconds: float = 90.0) -> None:
    """Poll until the condition holds; fails with its description when it does not in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {description}"
        time.sleep(0.01)


@pytest.fixture(name="wait_until")
def wait_until_fixture() -> Callable[..., None]:
    return wait_until


def has_ended(process: psutil.Process) -> bool:
    try:
        # What is left of a zombie only waits for init.
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def wait_until_ended() -> Callable[..., None]:
    """Waits for processes that need not be our children."""

    def wait(*processes: psutil.Process) -> None:
        wait_until(lambda: all(map(has_ended, processes)), f"{processes} have ended")

    return wait


@pytest.fixture
def start_user() -> Iterator[Callable[[Path], subprocess.Popen[str]]]:
    """Starts processes, each in a group of its own, that use a folder's Valkey until their stdin is closed.

    Their first line of output is the pid of the server.
    """
    users: list[subprocess.Popen[str]] = []

    def start(data_dir: Path) -> subprocess.Popen[str]:
        user = subprocess.Popen(
            [sys.executable, USER, data_dir],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        users.append(user)
        return user

    yield start
    for user in users:
        user.kill()
        user.wait()
        user.stdin.close()
        user.stdout.close()


@pytest.fixture(scope="session")
def tickets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """600 of the example's tickets as JSON lines."""
    return write_tickets(tmp_path_factory.mktemp("tickets") / "tickets.jsonl", 600)


@pytest.fixture(scope="module")
def few(tickets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve tickets."""
    path = tmp_path_factory.mktemp("few") / "few.jsonl"
    path.write_text("".join(tickets.read_text().splitlines(keepends=True)[:12]))
    return path


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A data folder with a worker that serves the tickets model for the whole session; it knows shelf:// too."""
    data_dir = tmp_path_factory.mktemp("served")
    store = install_for_workers(data_dir)
    settings = Settings.from_environment(environment(data_dir))
    # It ends with us, and the server it uses with it, even if we are killed.
    command = ["worker", "--model", str(MODEL), "--parent-pid", str(os.getpid())]
    with (
        redis_server(settings) as server,
        WorkerPresence(server.url) as presence,
        started(command, environment(data_dir, **store), data_dir / "worker") as worker,
    ):
        queue = shard_queue(str(MODEL), Precision())
        wait_until(lambda: presence.is_served(queue) or worker.poll() is not None, "the worker is ready", 120)
        assert worker.poll() is None, (data_dir / "worker/err").read_text()
        yield data_dir


@pytest.fixture(scope="session")
def api(served: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """The session's server: its jobs are done by the session's worker."""
    log = tmp_path_factory.mktemp("api") / "log"
    server = start_api(served, log, **SETTINGS)
    yield server
    stop_api(server, log)


@pytest.fixture(scope="session")
def openai_client(api: ApiServer) -> Iterator[OpenAI]:
    """The official client, of the session's server."""
    with OpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0, timeout=90) as client:
        yield client


@pytest.fixture(scope="session")
def llm() -> LLM:
    """The engine in this process: what the model really says."""
    return LLM(MODEL)


@pytest.fixture(scope="session")
def wait_until_done(api: ApiServer) -> Callable[[str], dict[str, Any]]:
    """Waits for a job of the session's server to end; returns it."""

    def wait(job_id: str) -> dict[str, Any]:
        wait_until(lambda: api.get(f"/jobs/{job_id}")["finished_at"] is not None, f"{job_id} has ended")
        return api.get(f"/jobs/{job_id}")

    return wait


@pytest.fixture
def client(served: Path) -> Iterator[Client]:
    """A client of the session's worker."""
    with Client(Settings.from_environment(environment(served))) as client:
        yield client


@pytest.fixture
def unserved(tmp_path: Path) -> Iterator[Client]:
    """A client whose jobs nobody works on."""
    with Client(Settings.from_environment(environment(tmp_path / "unserved"))) as client:
        yield client


@pytest.fixture
def headrace(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Runs the command line in this process, as its users see it."""

    def run(data_dir: Path, *arguments: str | Path, **more: str) -> Result:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["headrace", *map(str, arguments)])
            for name, value in environment(data_dir, **more).items():
                patch.setenv(name, value)
            with pytest.raises(SystemExit) as ended:
                main()
        printed = capfd.readouterr()
        return Result(int(ended.value.code or 0), printed.out, printed.err)

    return run


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("models") / "plain")


@pytest.fixture(scope="session")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model that reads images."""
    # With it come transformers, which takes its time.
    from ..engine.vision.seeing import save_seeing_model

    folder = tmp_path_factory.mktemp("models") / "seeing"
    save_seeing_model(folder)
    return folder


@pytest.fixture
def lasting_presence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that is announced once is believed however long the test takes."""
    monkeypatch.setattr(presence_module, "TTL_SECONDS", 600.0)


@pytest.fixture
def shop(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    """A job of one shard, once created, with an engine of its own; a shard that failed may be tried again at once."""
    monkeypatch.setattr(leases, "_FIRST_PAUSE_SECONDS", 0.0)
    ledger = new_ledger(tmp_path / "ledger.db")
    runner = GatedRunner()
    with hosted(runner, max_num_seqs=1) as (host, _):
        yield Shop(tmp_path, model, ledger, runner, host, iter(range(100)))
    ledger.close()


@pytest.fixture
def start() -> Iterator[Callable[..., "Future[Any]"]]:
    """Runs something in a thread."""
    with ThreadPoolExecutor(4) as pool:
        yield pool.submit
