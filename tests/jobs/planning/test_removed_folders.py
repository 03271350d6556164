"""A folder that was removed by hand while its job was not done holds the rows of the next job there, and no others."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.jobs.client.client import Client
from headrace.jobs.settings import Settings
from headrace.storage.ledger.records import JobState

from ..running import LABELS, MODEL, environment


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """Nobody works on its jobs."""
    with Client(Settings.from_environment(environment(tmp_path_factory.mktemp("data")))) as client:
        yield client


@pytest.mark.parametrize("mode", ["new", "resume", "overwrite"])
def test_the_job_before_is_cancelled(client: Client, tmp_path: Path, mode: str) -> None:
    rows = [{"text": "Where is my parcel?"}]
    elsewhere, before = (
        client.submit(rows, MODEL, tmp_path / name, prompt="{text}", choices=LABELS) for name in ("elsewhere", "out")
    )
    shutil.rmtree(tmp_path / "out")
    after = client.submit(rows, MODEL, tmp_path / "out", mode=mode, prompt="{text}", choices=LABELS)
    states = [job.progress().state for job in (elsewhere, before, after)]
    assert states == [JobState.RUNNING, JobState.CANCELLED, JobState.RUNNING]
    assert {path.name for path in client.jobs_folder.iterdir()} >= {elsewhere.id, after.id}
    assert not (client.jobs_folder / before.id).exists()
