"""Which shard a row was planned into is written down, and found again."""

import random
from array import array
from pathlib import Path

import pyarrow as pa
import pytest

from headrace.storage.errors import StorageError
from headrace.storage.rows import planned_rows as module
from headrace.storage.rows.planned_rows import PLANNED_ROWS, plan_anew, planned_rows, read_planned_shards
from headrace.storage.rows.spool import PlannedRow, write_shard

NUM_SHARDS, SHARD_ROWS = 70, 3
NUM_ROWS = NUM_SHARDS * SHARD_ROWS


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
def test_every_row_has_its_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group_rows: int) -> None:
    monkeypatch.setattr(module, "_GROUP_ROWS", group_rows)
    of_rows = write(tmp_path)
    found = read_planned_shards(tmp_path, NUM_ROWS)
    assert found is not None
    assert found.tolist() == of_rows


@pytest.mark.parametrize("group_rows", [1, 1 << 18])
def test_of_few_shards_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group_rows: int) -> None:
    monkeypatch.setattr(module, "_GROUP_ROWS", group_rows)
    write(tmp_path, 64)
    assert not (tmp_path / PLANNED_ROWS).exists()
    assert read_planned_shards(tmp_path, NUM_ROWS) is None


def test_a_file_of_which_rows_are_missing_says_nothing(tmp_path: Path) -> None:
    write(tmp_path, NUM_SHARDS - 1)
    assert read_planned_shards(tmp_path, NUM_ROWS) is None


def test_a_file_with_more_rows_says_nothing(tmp_path: Path) -> None:
    write(tmp_path)
    assert read_planned_shards(tmp_path, NUM_ROWS - 1) is None


def test_a_full_disk_is_told(tmp_path: Path) -> None:
    (tmp_path / PLANNED_ROWS).symlink_to("/dev/full")
    with pytest.raises(StorageError, match=f"cannot write {tmp_path / PLANNED_ROWS}: .*No space left"):
        write(tmp_path)


def test_what_goes_wrong_elsewhere_meanwhile_is_not_its_fault(tmp_path: Path) -> None:
    with pytest.raises(ConnectionResetError), planned_rows(tmp_path):
        raise ConnectionResetError("the input's server")


@pytest.mark.parametrize("is_written", [True, False], ids=["many shards", "few shards"])
def test_rows_that_were_planned_anew_are_the_later_shards(tmp_path: Path, is_written: bool) -> None:
    of_rows = write(tmp_path, NUM_SHARDS if is_written else 64)
    schema = pa.schema([("text", pa.string())])
    for number, rows in ((NUM_SHARDS, [5, 2]), (NUM_SHARDS + 1, [100])):
        planned = [PlannedRow(row, str(row), {"text": "a"}, [1], None) for row in rows]
        write_shard(tmp_path / f"{number}.parquet", planned, schema)
    plan_anew(tmp_path, NUM_ROWS, {number: tmp_path / f"{number}.parquet" for number in (NUM_SHARDS, NUM_SHARDS + 1)})
    found = read_planned_shards(tmp_path, NUM_ROWS)
    if is_written:
        assert found is not None
        of_rows[5], of_rows[2], of_rows[100] = NUM_SHARDS, NUM_SHARDS, NUM_SHARDS + 1
        assert found.tolist() == of_rows
    else:
        assert found is None
