"""Which shard a row was planned into is written down, and found again."""

import random
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.storage.errors import StorageError
from headrace.storage.ledger import planned_rows as module
from headrace.storage.ledger.ledger import Ledger
from headrace.storage.ledger.planned_rows import PLANNED_ROWS, planned_rows, read_planned_shards, retries
from headrace.storage.ledger.records import NewJob, NewShard

NUM_SHARDS, SHARD_ROWS = 70, 3
NUM_ROWS = NUM_SHARDS * SHARD_ROWS


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    ledger = Ledger(f"sqlite:///{tmp_path / 'ledger.db'}")
    ledger.migrate()
    new = NewJob("job_1", "bulk", "tiny", str(tmp_path / "out"), "abc", NUM_ROWS, {}, 0)
    shards = [NewShard(number, SHARD_ROWS, str(tmp_path / f"{number}.parquet")) for number in range(NUM_SHARDS)]
    retrying = NewShard(NUM_SHARDS, 1, shards[7].spool_path, retry_of=7)
    ledger.create_job(new, [*shards, retrying])
    yield ledger
    ledger.close()


def write(folder: Path, num_shards: int = NUM_SHARDS) -> list[int]:
    """Returns each row's shard."""
    rows = random.Random(3).sample(range(NUM_ROWS), NUM_ROWS)
    of_rows = [0] * NUM_ROWS
    with planned_rows(folder) as planned:
        for shard in range(num_shards):
            own = rows[shard * SHARD_ROWS : (shard + 1) * SHARD_ROWS]
            planned.add(shard, array("q", own))
            for row in own:
                of_rows[row] = shard
    return of_rows


@pytest.mark.parametrize("group_rows", [1, 100, 1 << 18])
def test_every_row_has_its_shard(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group_rows: int
) -> None:
    monkeypatch.setattr(module, "_GROUP_ROWS", group_rows)
    of_rows = write(tmp_path)
    found = read_planned_shards(ledger.database, "job_1", NUM_ROWS)
    assert found is not None
    assert found.tolist() == of_rows


@pytest.mark.parametrize("group_rows", [1, 1 << 18])
def test_of_few_shards_nothing_is_written(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group_rows: int
) -> None:
    monkeypatch.setattr(module, "_GROUP_ROWS", group_rows)
    write(tmp_path, 64)
    assert not (tmp_path / PLANNED_ROWS).exists()
    assert read_planned_shards(ledger.database, "job_1", NUM_ROWS) is None


def test_a_file_of_which_rows_are_missing_says_nothing(ledger: Ledger, tmp_path: Path) -> None:
    write(tmp_path, NUM_SHARDS - 1)
    assert read_planned_shards(ledger.database, "job_1", NUM_ROWS) is None


def test_a_file_with_more_rows_says_nothing(ledger: Ledger, tmp_path: Path) -> None:
    write(tmp_path)
    assert read_planned_shards(ledger.database, "job_1", NUM_ROWS - 1) is None


def test_a_job_that_nobody_knows_has_no_plan(ledger: Ledger) -> None:
    assert read_planned_shards(ledger.database, "job_2", NUM_ROWS) is None


def test_a_full_disk_is_told(tmp_path: Path) -> None:
    (tmp_path / PLANNED_ROWS).symlink_to("/dev/full")
    with pytest.raises(StorageError, match=f"cannot write {tmp_path / PLANNED_ROWS}: .*No space left"):
        write(tmp_path)


def test_whose_rows_are_tried_again(ledger: Ledger) -> None:
    assert retries(ledger.database, "job_1") == {NUM_SHARDS: 7}


def test_what_goes_wrong_elsewhere_meanwhile_is_not_its_fault(tmp_path: Path) -> None:
    with pytest.raises(ConnectionResetError), planned_rows(tmp_path):
        raise ConnectionResetError("the input's server")
