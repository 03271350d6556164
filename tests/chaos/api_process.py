"""`headrace serve` on one address for the whole run, killed and started again."""

import os
import socket
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2

from ..jobs.running import COMMAND

_SECONDS = 120.0
_LOG_CHARACTERS = 5000


class ApiProcess:
    """A context manager. `http` answers while it runs."""

    def __init__(self, model: Path, env: Mapping[str, str], log: Path) -> None:
        self._command = [*COMMAND, "serve", "--model", str(model)]
        self._env, self._log = env, log
        self._port = _free_port()
        self._process: subprocess.Popen[str] | None = None
        self.url = ""

    def start(self) -> None:
        """Come back where it was before."""
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                [*self._command, "--port", str(self._port)],
                env=self._env,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self._process = process
        assert process.stdout is not None
        self.url = process.stdout.readline().removeprefix("headrace: listening on ").strip()
        assert self.url, self._log.read_text()

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.communicate()

    def post(self, path: str, headers: Mapping[str, str], **body: Any) -> dict[str, Any]:
        """Raises httpx2's errors, with the end of the server's log where it refuses."""
        answer = httpx2.post(f"{self.url}{path}", json=body, headers=dict(headers), timeout=_SECONDS)
        try:
            found: dict[str, Any] = answer.raise_for_status().json()
        except httpx2.HTTPStatusError as error:
            error.add_note(f"{answer.text}\n{self._log.read_text()[-_LOG_CHARACTERS:]}")
            raise
        return found

    def __enter__(self) -> "ApiProcess":
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            self._process.communicate(timeout=_SECONDS)


def _free_port() -> int:
    """One that no connection is given as its own end while the server is away, which Linux does from 32768 on."""
    for port in range(20_000 + os.getpid() % 5_000, 32_000):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise OSError("no free port below 32000")
