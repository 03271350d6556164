"""A server process of a test's own, and what its errors look like."""

import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from ..running import COMMAND, LABELS, MODEL, environment

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
        _, log = self.process.communicate(timeout=60)
        assert self.process.returncode == 0
        assert "Traceback" not in log
        return log


def start_server(data_dir: Path, **settings: str) -> Server:
    process = subprocess.Popen(
        [*COMMAND, "serve", "--model", MODEL, "--port", "0"],
        env=environment(data_dir, HEADRACE_SHARD_ROWS="8", **settings),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    url = process.stdout.readline().removeprefix("headrace: listening on ").strip()
    return Server(process, httpx2.Client(base_url=url, timeout=90), data_dir)


def assert_error(response: httpx2.Response, status: int, code: str | None, param: str | None = None) -> str:
    """The answer is an error as OpenAI's clients know it; returns the message."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    kind = "server_error" if status >= 500 else "invalid_request_error"
    assert error == {"message": error["message"], "type": kind, "param": param, "code": code}
    assert error["message"]
    assert "\n" not in error["message"]
    return error["message"]
