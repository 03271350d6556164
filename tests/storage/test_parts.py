"""Part files: what is visible at each step, and what the next attempt finds."""

from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.storage import parts
from headrace.storage.errors import PartMissing, StorageError
from headrace.storage.records import NewPart

NAME = "part-00003-01-000.parquet"


def table(*rows: int) -> pa.Table:
    return pa.table({"row": pa.array(rows, pa.int64()), "output": ["x"] * len(rows)})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_file_names() -> None:
    assert parts.part_file_name(3, 1, 0) == NAME
    assert parts.part_file_name(123456, 100, 1000) == "part-123456-100-1000.parquet"


def test_part_is_invisible_until_published(tmp_path: Path) -> None:
    parts.write_part(tmp_path, NAME, table(4, 2))
    assert names(tmp_path) == [f".{NAME}.tmp"]
    parts.publish(tmp_path, NAME)
    parts.publish(tmp_path, NAME)
    assert names(tmp_path) == [NAME]
    assert pq.read_table(tmp_path / NAME).equals(table(4, 2))


def test_discard(tmp_path: Path) -> None:
    parts.write_part(tmp_path, NAME, table(1))
    parts.discard(tmp_path, NAME)
    parts.discard(tmp_path, NAME)
    assert names(tmp_path) == []


def test_missing_part(tmp_path: Path) -> None:
    with pytest.raises(PartMissing, match=NAME):
        parts.publish(tmp_path, NAME)


def test_damaged_part_is_named(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(b"PAR1 but not really PAR1")
    with pytest.raises(StorageError, match=f"{NAME}.*delete it") as caught:
        parts.recover_shard(tmp_path, 3, 2, [NAME])
    assert "\n" not in str(caught.value)


def test_part_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="No such file or directory"):
        parts.write_part(tmp_path / "gone", NAME, table(1))


def test_full_disk_leaves_nothing(tmp_path: Path) -> None:
    # The device that is always full, in the place of the temporary file.
    (tmp_path / f".{NAME}.tmp").symlink_to("/dev/full")
    with pytest.raises(StorageError, match=r"cannot write .*No space left"):
        parts.write_part(tmp_path, NAME, table(1))
    assert names(tmp_path) == []


def test_recovery_completes_the_committed_and_removes_the_rest(tmp_path: Path) -> None:
    published, unpublished, gone = (f"part-00003-01-00{n}.parquet" for n in range(3))
    parts.write_part(tmp_path, published, table(0))
    parts.publish(tmp_path, published)
    parts.write_part(tmp_path, unpublished, table(1, 2))
    for stray in ("part-00003-01-003.parquet", "part-00003-02-000.parquet"):
        parts.write_part(tmp_path, stray, table(9))
    kept = ["part-00003-03-000.parquet", "part-00004-01-000.parquet"]
    for name in kept:
        parts.write_part(tmp_path, name, table(8))
    recovered = parts.recover_shard(tmp_path, 3, 3, [published, unpublished, gone])
    assert recovered == parts.Recovered(rows=frozenset({0, 1, 2}), missing=(gone,))
    assert names(tmp_path) == sorted([published, unpublished, *(f".{name}.tmp" for name in kept)])


def test_folder_whose_name_looks_like_a_partition(tmp_path: Path) -> None:
    folder = tmp_path / "row=7"
    folder.mkdir()
    parts.write_part(folder, NAME, table(1))
    assert parts.recover_shard(folder, 3, 2, [NAME]).rows == {1}


def test_output_columns_in_duckdb(tmp_path: Path) -> None:
    schema = parts.output_schema([pa.field("text", pa.string())], choices=("a", "b"))
    row = dict.fromkeys(schema.names) | {"row": 0, "text": "hi", "probabilities": {"a": 0.75, "b": 0.25}}
    parts.write_part(tmp_path, NAME, pa.Table.from_pylist([row], schema=schema))
    parts.publish(tmp_path, NAME)
    found = duckdb.connect().execute(f"SELECT *, probabilities['a'] AS p FROM '{tmp_path}/*.parquet'")
    assert [column[0] for column in found.description or []] == [*schema.names, "p"]
    assert found.fetchall()[0][-1] == 0.75


def test_probabilities_are_there_on_demand() -> None:
    assert parts.output_schema([]).names == [
        "row",
        "custom_id",
        "output",
        "label",
        "confidence",
        "finish_reason",
        "prompt_tokens",
        "cached_tokens",
        "completion_tokens",
        "error",
    ]


def test_a_committed_part_is_found_under_whichever_name_it_has(tmp_path: Path) -> None:
    assert parts.committed_file(tmp_path, NAME) is None
    parts.write_part(tmp_path, NAME, table(1))
    assert parts.committed_file(tmp_path, NAME) == tmp_path / f".{NAME}.tmp"
    parts.publish(tmp_path, NAME)
    assert parts.committed_file(tmp_path, NAME) == tmp_path / NAME


def test_settling_withdraws_what_was_replaced_and_publishes_the_rest(tmp_path: Path) -> None:
    old, kept, foreign = "part-00000-01-000.parquet", "part-00000-01-001.parquet", "part-00000-07-000.parquet"
    new = "part-00002-03-000.parquet"
    for name in (old, kept, foreign):
        parts.write_part(tmp_path, name, table(1))
        parts.publish(tmp_path, name)
    parts.write_part(tmp_path, new, table(2))
    for _ in range(2):
        published = parts.published_by(tmp_path, {1, 3})
        parts.settle(tmp_path, published, [kept, new])
        assert names(tmp_path) == [kept, foreign, new]


def test_a_part_is_summed_up(tmp_path: Path) -> None:
    rows = [{"row": 0, "prompt_tokens": 5, "completion_tokens": 2}, {"row": 1, "prompt_tokens": 3, "error": "no"}]
    summary = parts.part_summary(NAME, pa.Table.from_pylist(rows, schema=parts.output_schema([])))
    assert summary == NewPart(NAME, num_rows=2, num_failed=1, prompt_tokens=8, completion_tokens=2)


def test_the_last_attempt_of_a_job_tidies_up_after_those_before_it_at_any_shard(tmp_path: Path) -> None:
    names_of = {attempt: parts.part_file_name(shard, attempt, 0) for shard, attempt in ((3, 1), (5, 2), (4, 7), (3, 9))}
    for name in names_of.values():
        parts.write_part(tmp_path, name, table(1))
    parts.publish(tmp_path, names_of[1])
    parts.remove_all_strays(tmp_path, attempt_id=7)
    assert names(tmp_path) == sorted([names_of[1], f".{names_of[7]}.tmp", f".{names_of[9]}.tmp"])
