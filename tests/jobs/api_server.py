"""`headrace serve` as its users start it."""

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from .running import COMMAND, MODEL, environment

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


def start_api(data_dir: Path, log: Path, model: Path = MODEL, /, **settings: str) -> ApiServer:
    """A server that is listening; it logs into the file `log`."""
    command = [*COMMAND, "serve", "--model", str(model), "--port", "0", "--grpc-port", "0"]
    with log.open("w") as file:
        process = subprocess.Popen(
            command, env=environment(data_dir, **settings), stdout=subprocess.PIPE, stderr=file, text=True
        )
    url, grpc = (process.stdout.readline().removeprefix("headrace: listening on ").strip() for _ in range(2))
    if not grpc.startswith("grpc://"):
        process.kill()
        raise AssertionError(log.read_text())
    return ApiServer(process, url, grpc.removeprefix("grpc://"), httpx2.Client(base_url=url, timeout=90), data_dir)


def stop_api(server: ApiServer, log: Path) -> None:
    server.http.close()
    server.process.terminate()
    try:
        server.process.wait(60)
    finally:
        # One that does not end in good order is not to stay either.
        server.process.kill()
        server.process.stdout.close()
    assert "Traceback" not in log.read_text()
