"""Several processes at one ledger, and processes that are killed."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import text

from headrace.storage.ledger.ledger import Ledger
from headrace.storage.ledger.records import JobState
from headrace.storage.output import parts
from headrace.storage.output.local_folder import LocalFolder
from headrace.storage.output.sinks import DEFAULT_TABLE

from .claiming import take_shard

HERE = Path(__file__).parent


def start(script: str, *arguments: str, stdin: int = subprocess.PIPE) -> "subprocess.Popen[str]":
    command = [sys.executable, str(HERE / script), *arguments]
    return subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE, text=True)


def test_each_shard_goes_to_exactly_one_process(
    ledger: Ledger, database_url: str, create_job: Callable[..., str]
) -> None:
    create_job(num_shards=200)
    # One for all: they begin at once.
    signal, give_signal = os.pipe()
    workers = [start("claim_until_empty.py", database_url, f"worker-{number}", stdin=signal) for number in range(4)]
    os.close(signal)
    for worker in workers:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n"
    os.close(give_signal)
    claimed = [json.loads(worker.communicate(timeout=60)[0]) for worker in workers]
    assert sorted(number for numbers in claimed for number in numbers) == list(range(200))
    assert sum(bool(numbers) for numbers in claimed) > 1, "they did not run side by side"
    progress = ledger.progress("job-1")
    assert (progress.state, progress.rows_done) == (JobState.COMPLETED, 400)


@pytest.mark.parametrize(
    ("last_step", "rows_kept"), [("write", set()), ("fill", set()), ("commit", {0, 1}), ("publish", {0, 1})]
)
def test_killed_between_the_steps_of_a_commit(
    last_step: str,
    rows_kept: set[int],
    ledger: Ledger,
    database_url: str,
    create_job: Callable[..., str],
    tmp_path: Path,
) -> None:
    create_job(num_shards=1)
    folder = tmp_path / "out"
    folder.mkdir()
    victim = start("die_in_commit.py", database_url, str(folder), last_step)
    assert victim.stdout is not None
    assert victim.stdout.readline() == "there\n"
    victim.kill()
    victim.communicate(timeout=60)
    visible_before = list(folder.glob("*.parquet"))
    assert bool(visible_before) == (last_step == "publish")

    claim = take_shard(ledger, "job-1/00000", "heir", 60)
    assert claim is not None
    committed = [part.file_name for part in ledger.parts("job-1", claim.shard_number)]
    shard = (claim.job_id, claim.shard_number, claim.attempt_number)
    recovered = parts.recover_shard(LocalFolder(folder), *shard, committed)
    assert recovered.rows == rows_kept
    assert recovered.missing == ()
    assert sorted(path.name for path in folder.iterdir()) == committed
    assert ledger.progress("job-1").rows_done == len(rows_kept)
    # What goes to a table in the ledger's database is there when it is done, not before.
    with ledger.database.read() as connection:
        assert set(connection.scalars(text(f"select row from {DEFAULT_TABLE}"))) == rows_kept
