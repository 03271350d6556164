"""A client with workers of `forked_worker`, for tests that kill them."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.jobs.client.client import Client
from headrace.jobs.settings import Settings

from ..conftest import wait_until
from ..running import ROOT, environment, processes_of


@contextmanager
def client_of_workers(model: Path, folder: Path, **variables: str) -> Iterator[Client]:
    """A worker serves `model`, and in its place a new one when it dies; their pids are in the file `pids`."""
    data, log_file = folder / "data", folder / "log"
    env = environment(data, **{"HEADRACE_LEASE_SECONDS": "1", **variables})
    command = [sys.executable, "-m", "tests.jobs.forked_worker", str(model), str(folder / "pids")]
    with (
        Client(Settings.from_environment(env)) as client,
        log_file.open("wb") as log,
        subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log) as workers,
    ):
        try:
            yield client
        finally:
            workers.terminate()
            status = workers.wait(90)
        assert status == 0, log_file.read_text()
    wait_until(lambda: not processes_of(data), "nothing is left")
