"""Planned rows to a file and back."""

import resource
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from headrace.storage.errors import StorageError
from headrace.storage.output.parts import output_schema
from headrace.storage.rows.columns import SchemaUnifier
from headrace.storage.rows.spool import PlannedRow, input_fields, read_shard, row_samplings, write_shard

ROWS = [
    PlannedRow(3, "a", {"text": "x", "output": 1, "custom_id": "a", "mixed": [1]}, [1, 2], None),
    PlannedRow(1, "1", {"text": "y", "mixed": "z"}, [], None),
    PlannedRow(0, "0", {}, None, "line 1: not valid JSON"),
]


def test_shard_comes_back(tmp_path: Path) -> None:
    unifier = SchemaUnifier()
    for row in ROWS:
        unifier.observe(row.values)
    path = tmp_path / "job-1" / "00000.parquet"
    write_shard(path, ROWS, unifier.schema())
    table = read_shard(path)
    assert table.to_pydict() == {
        "row": [3, 1, 0],
        "custom_id": ["a", "1", "0"],
        "text": ["x", "y", None],
        "input_output": [1, None, None],
        "mixed": ["[1]", '"z"', None],
        "prompt_token_ids": [[1, 2], [], None],
        "plan_error": [None, None, "line 1: not valid JSON"],
    }
    assert table.schema.field("prompt_token_ids").type == pa.list_(pa.int32())
    fields = input_fields(table.schema)
    assert [field.name for field in fields] == ["text", "input_output", "mixed"]
    assert output_schema(fields).field("input_output").type == pa.int64()


def test_shards_of_one_job_have_one_schema(tmp_path: Path) -> None:
    schema = pa.schema({"n": pa.uint16(), "t": pa.timestamp("ns")})
    for number, values in enumerate(({"n": 1, "t": None}, {})):
        write_shard(tmp_path / f"{number}.parquet", [PlannedRow(0, "0", values, None, None)], schema)
    first, second = (read_shard(tmp_path / f"{number}.parquet").schema for number in range(2))
    assert first.equals(second, check_metadata=True)


def test_rows_may_bring_their_own_sampling(tmp_path: Path) -> None:
    rows = [PlannedRow(0, "0", {}, [1], None, '{"n":2}'), PlannedRow(1, "1", {}, None, "line 2: broken")]
    write_shard(tmp_path / "own.parquet", rows, pa.schema([]))
    table = read_shard(tmp_path / "own.parquet")
    assert list(row_samplings(table)) == ['{"n":2}', None]
    assert input_fields(table.schema) == []


@pytest.mark.parametrize("content", [None, b"not parquet"])
def test_unreadable_shard(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "00000.parquet"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(StorageError, match="submit the job again"):
        read_shard(path)


def test_a_shard_that_cannot_be_read_now_is_not_lost(tmp_path: Path) -> None:
    """As where a process may open no more files: nobody has to submit anything again."""
    path = tmp_path / "00000.parquet"
    write_shard(path, ROWS, pa.schema([]))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with pytest.raises(
            StorageError, match=r"mend what keeps it from being read \(.*Too many open files"
        ) as refused:
            read_shard(path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "submit the job again" not in str(refused.value)
    assert read_shard(path).num_rows == len(ROWS)


def test_a_shard_is_read_without_the_half_of_pyarrow_that_is_imported_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker's threads would import it at once: where no file can be opened then, pyarrow says something else."""
    path = tmp_path / "00000.parquet"
    write_shard(path, ROWS, pa.schema([]))
    monkeypatch.setitem(sys.modules, "pyarrow.dataset", None)
    assert read_shard(path).num_rows == len(ROWS)
