"""One API server for the whole session, over the data folder of the session's worker (`served`)."""

import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

from ..conftest import wait_until
from ..running import COMMAND, MODEL, environment
from .live_desk import LiveDesk, live_desk
from .own_server import Server, start_server

# What a server has to allow for the tests' own receivers and files, which are on this host.
SETTINGS = {
    "HEADRACE_ALLOW_PRIVATE_ADDRESSES": "true",
    "HEADRACE_INPUT_URLS": "http://127.0.0.1:,memory://",
}


@dataclass(frozen=True)
class ApiServer:
    """A running `headrace serve`. `model` is the name that requests use; `http` talks to `url`; `grpc` is HOST:PORT."""

    process: "subprocess.Popen[str]"
    url: str
    grpc: str
    http: httpx2.Client
    data_dir: Path
    model: str = MODEL.name

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        """What a request that succeeds is answered."""
        return self.http.post(path, json=body).raise_for_status().json()

    def get(self, path: str, **query: Any) -> dict[str, Any]:
        return self.http.get(path, params=query).raise_for_status().json()


def start_api(data_dir: Path, log: Path, **settings: str) -> ApiServer:
    """A server that is listening; it logs into the file `log`."""
    command = [*COMMAND, "serve", "--model", str(MODEL), "--port", "0", "--grpc-port", "0"]
    with log.open("w") as file:
        process = subprocess.Popen(
            command, env=environment(data_dir, **settings), stdout=subprocess.PIPE, stderr=file, text=True
        )
    url, grpc = (process.stdout.readline().removeprefix("headrace: listening on ").strip() for _ in range(2))
    assert grpc.startswith("grpc://"), log.read_text()
    return ApiServer(process, url, grpc.removeprefix("grpc://"), httpx2.Client(base_url=url, timeout=30), data_dir)


def stop_api(server: ApiServer, log: Path) -> None:
    server.http.close()
    server.process.terminate()
    server.process.wait(20)
    server.process.stdout.close()
    assert "Traceback" not in log.read_text()


@pytest.fixture(scope="session")
def api(served: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """The session's server: its jobs are done by the session's worker."""
    log = tmp_path_factory.mktemp("api") / "log"
    server = start_api(served, log, **SETTINGS)
    yield server
    stop_api(server, log)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose jobs nobody works on."""
    server = start_server(tmp_path_factory.mktemp("unattended"))
    yield server
    server.stop()


@pytest.fixture(scope="session")
def wait_until_done(api: ApiServer) -> Callable[[str], dict[str, Any]]:
    """Waits for a job of the session's server to end; returns it."""

    def wait(job_id: str) -> dict[str, Any]:
        wait_until(lambda: api.get(f"/jobs/{job_id}")["finished_at"] is not None, f"{job_id} has ended", 40)
        return api.get(f"/jobs/{job_id}")

    return wait


@pytest.fixture(scope="session")
def desk(api: ApiServer) -> Iterator[LiveDesk]:
    """The live requests of the session's server and worker."""
    with live_desk(api.data_dir) as desk:
        yield desk
