"""A worker and an API server as processes of their own, and what they take of the processors."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

COMMAND = (sys.executable, "-P", "-m", "headrace.jobs.cli")
PATIENCE_SECONDS = 60.0
_TICKS = os.sysconf("SC_CLK_TCK")


@contextmanager
def worker(env: dict[str, str], log: Path, model: Path, options: Sequence[str] = ()) -> "Iterator[int]":
    """A worker that serves the model; yields its process id. `log`: a file of its own."""
    command = [*COMMAND, "worker", "--model", str(model), *options]
    with log.open("w") as out, subprocess.Popen(command, env=env, stdout=out, stderr=out) as process:
        try:
            deadline = time.monotonic() + PATIENCE_SECONDS
            while "serving" not in log.read_text():
                if time.monotonic() > deadline or process.poll() is not None:
                    raise RuntimeError(f"the worker does not serve: {log.read_text()}")
                time.sleep(0.05)
            yield process.pid
        finally:
            process.terminate()


@contextmanager
def server(env: dict[str, str], log: Path, model: Path) -> "Iterator[tuple[int, str]]":
    """An API server; yields its process id and its URL."""
    command = [*COMMAND, "serve", "--model", str(model), "--port", "0"]
    with (
        log.open("w") as err,
        subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=err, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            url = process.stdout.readline().removeprefix("headrace: listening on ").strip()
            if not url:
                raise RuntimeError(f"the server does not listen: {log.read_text()}")
            yield process.pid, url
        finally:
            process.terminate()


def new_key(env: dict[str, str], tenant: str) -> str:
    """An API key of the tenant's."""
    command = [*COMMAND, "keys", "create", "--tenant", tenant, "--json"]
    done = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
    key: str = json.loads(done.stdout)["key"]
    return key


def cpu_seconds(pid: int) -> float:
    """What a process has taken so far, in user and system mode."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS
