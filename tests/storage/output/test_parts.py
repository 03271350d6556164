"""Part files: what is visible at each step, and what the next attempt finds."""

from inspect import signature
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.storage.errors import OutputLost, PartMissing, StorageError
from headrace.storage.ledger.records import NewPart
from headrace.storage.output import parts
from headrace.storage.output.folder import OutputFolder
from headrace.storage.output.local_folder import LocalFolder
from headrace.storage.output.remote_folder import RemoteFolder
from headrace.storage.rows.columns import REASONING_NAMES, RESERVED_NAMES

from ...duck import read_by_duckdb

JOB = "job-1"
# As those of before parts were marked with their job.
NAME = "part-00003-01-000.parquet"


def table(*rows: int) -> pa.Table:
    return pa.table({"row": pa.array(rows, pa.int64()), "output": ["x"] * len(rows)})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_file_names() -> None:
    assert parts.part_file_name(JOB, 3, 1, 0) == "part-00003-01-000-ee2a3972.parquet"
    assert parts.part_file_name(JOB, 123456, 100, 1000) == "part-123456-100-1000-ee2a3972.parquet"
    assert parts.part_file_name("job-2", 3, 1, 0) != parts.part_file_name(JOB, 3, 1, 0)


def test_part_is_invisible_until_published(tmp_path: Path) -> None:
    LocalFolder(tmp_path).write_part(NAME, table(4, 2))
    assert names(tmp_path) == [f".{NAME}.tmp"]
    LocalFolder(tmp_path).publish(NAME)
    LocalFolder(tmp_path).publish(NAME)
    assert names(tmp_path) == [NAME]
    assert pq.read_table(tmp_path / NAME).equals(table(4, 2))


def test_discard(tmp_path: Path) -> None:
    LocalFolder(tmp_path).write_part(NAME, table(1))
    LocalFolder(tmp_path).discard(NAME)
    LocalFolder(tmp_path).discard(NAME)
    assert names(tmp_path) == []


def test_missing_part(tmp_path: Path) -> None:
    with pytest.raises(PartMissing, match=NAME):
        LocalFolder(tmp_path).publish(NAME)


def test_damaged_part_is_named(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(b"PAR1 but not really PAR1")
    with pytest.raises(StorageError, match=f"{NAME}.*delete it") as caught:
        parts.recover_shard(LocalFolder(tmp_path), JOB, 3, 2, [NAME])
    assert "\n" not in str(caught.value)


def test_where_nothing_can_be_written_or_removed_it_is_named(tmp_path: Path) -> None:
    """As on a disk that is only to be read: what is left of a part cannot be removed there either."""
    folder = LocalFolder(tmp_path / "file")
    folder.path.touch()
    with pytest.raises(StorageError, match=f"cannot write .*{NAME}.*: Not a directory"):
        folder.write_part(NAME, table(1))
    for remove in (folder.discard, folder.withdraw):
        with pytest.raises(StorageError, match=f"cannot remove .*{NAME}.*: Not a directory"):
            remove(NAME)


def test_a_folder_that_is_gone_when_a_part_is_written_is_named(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path / "out")
    with pytest.raises(OutputLost, match=f"output folder {folder} is gone or empty: bring back what was in it"):
        folder.write_part(NAME, table(1))


def test_full_disk_leaves_nothing(tmp_path: Path) -> None:
    # The device that is always full, in the place of the temporary file.
    (tmp_path / f".{NAME}.tmp").symlink_to("/dev/full")
    with pytest.raises(StorageError, match=r"cannot write .*No space left"):
        LocalFolder(tmp_path).write_part(NAME, table(1))
    assert names(tmp_path) == []


def test_recovery_completes_the_committed_and_removes_the_rest(tmp_path: Path) -> None:
    published, unpublished, gone = (f"part-00003-01-00{n}.parquet" for n in range(3))
    LocalFolder(tmp_path).write_part(published, table(0))
    LocalFolder(tmp_path).publish(published)
    LocalFolder(tmp_path).write_part(unpublished, table(1, 2))
    for stray in ("part-00003-01-003.parquet", "part-00003-02-000.parquet"):
        LocalFolder(tmp_path).write_part(stray, table(9))
    kept = ["part-00003-03-000.parquet", "part-00004-01-000.parquet"]
    for name in kept:
        LocalFolder(tmp_path).write_part(name, table(8))
    recovered = parts.recover_shard(LocalFolder(tmp_path), JOB, 3, 3, [published, unpublished, gone])
    assert recovered == parts.Recovered(rows=frozenset({0, 1, 2}), missing=(gone,))
    assert names(tmp_path) == sorted([published, unpublished, *(f".{name}.tmp" for name in kept)])


def test_folder_whose_name_looks_like_a_partition(tmp_path: Path) -> None:
    folder = tmp_path / "row=7"
    folder.mkdir()
    LocalFolder(folder).write_part(NAME, table(1))
    assert parts.recover_shard(LocalFolder(folder), JOB, 3, 2, [NAME]).rows == {1}


def test_output_columns_in_duckdb(tmp_path: Path) -> None:
    schema = parts.output_schema([pa.field("text", pa.string())], choices=("a", "b"))
    row = dict.fromkeys(schema.names) | {"row": 0, "text": "hi", "probabilities": {"a": 0.75, "b": 0.25}}
    LocalFolder(tmp_path).write_part(NAME, pa.Table.from_pylist([row], schema=schema))
    LocalFolder(tmp_path).publish(NAME)
    query = f"SELECT *, probabilities['a'] AS p FROM '{tmp_path}/*.parquet'"
    assert [name for name, *_ in read_by_duckdb(f"DESCRIBE {query}")] == [*schema.names, "p"]
    assert read_by_duckdb(query)[0][-1] == 0.75


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


def test_every_column_is_described_and_reserved() -> None:
    page = (Path(__file__).parents[3] / "docs/data-set.md").read_text()
    flags = [name for name in signature(parts.output_schema).parameters if name.startswith("with_")]
    schema = parts.output_schema([], choices=("a",), parsed=pa.bool_(), **dict.fromkeys(flags, True))
    # How each of `outputs` of a batch's rows ended: what the batch's own files are made of.
    of_batches = {"finish_reasons", "outputs_logprobs", "outputs_reasoning", "stop_reasons"}
    for name in schema.names:
        # An input of a job with reasoning has no such columns; of a batch's nothing is carried.
        assert name in {*RESERVED_NAMES, *REASONING_NAMES, "outputs_reasoning", "stop_reasons"}
        assert name in of_batches or f"`{name}`" in page
    assert all(f"`{field.name}`" in page for field in schema.field("receipt").type)


def test_a_committed_part_is_found_under_whichever_name_it_has(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path)
    assert folder.find_parts([NAME]) == []
    with pytest.raises(FileNotFoundError, match=NAME):
        folder.dataset([NAME])
    with pytest.raises(PartMissing, match=NAME):
        folder.read_part(NAME)
    folder.write_part(NAME, table(1))
    assert folder.dataset([NAME]).files == [f"{tmp_path}/.{NAME}.tmp"]
    assert folder.read_part(NAME).equals(table(1))
    folder.publish(NAME)
    assert folder.find_parts([NAME]) == [NAME]
    assert folder.dataset([NAME]).files == [f"{tmp_path}/{NAME}"]
    assert folder.read_part(NAME, ["row"]).equals(table(1).select(["row"]))


def test_settling_withdraws_what_was_replaced_and_publishes_the_rest(tmp_path: Path) -> None:
    old, kept, foreign = "part-00000-01-000.parquet", "part-00000-01-001.parquet", "part-00000-07-000.parquet"
    new = "part-00002-03-000.parquet"
    for name in (old, kept, foreign):
        LocalFolder(tmp_path).write_part(name, table(1))
        LocalFolder(tmp_path).publish(name)
    LocalFolder(tmp_path).write_part(new, table(2))
    for _ in range(2):
        published = parts.published_by(LocalFolder(tmp_path), JOB, {1, 3})
        parts.settle(LocalFolder(tmp_path), published, [kept, new])
        assert names(tmp_path) == [kept, foreign, new]


def test_a_part_is_summed_up(tmp_path: Path) -> None:
    rows = [{"row": 0, "prompt_tokens": 5, "completion_tokens": 2}, {"row": 1, "prompt_tokens": 3, "error": "no"}]
    summary = parts.part_summary(NAME, pa.Table.from_pylist(rows, schema=parts.output_schema([])))
    assert summary == NewPart(NAME, num_rows=2, num_failed=1, prompt_tokens=8, completion_tokens=2)


def test_a_part_tells_of_which_job_shard_and_attempt_it_is() -> None:
    mine, anothers = (parts.part_file_name(job, 4, 14, 0) for job in (JOB, "job-2"))
    names = [mine, anothers, NAME, "part-00003-01-000-x.parquet", "mine.parquet"]
    assert parts.parts_of([JOB], names) == [(mine, 4, 14), (NAME, 3, 1)]


def test_another_jobs_parts_are_left_alone_whatever_their_attempts(folder: OutputFolder) -> None:
    """Of two ledgers both begin to count at one."""
    mine, done, lost = (parts.part_file_name(JOB, 3, 1, sequence) for sequence in range(3))
    others = [parts.part_file_name("job-2", 3, 1, sequence) for sequence in range(2)]
    folder.make()
    for name in (mine, done, lost, *others):
        folder.write_part(name, table(1))
    for name in (done, others[0]):
        folder.publish(name)
    parts.recover_shard(folder, JOB, 3, 2, [mine])
    parts.settle(folder, parts.published_by(folder, JOB, {1}), [mine])
    assert folder.part_names() == sorted([mine, *others] if isinstance(folder, RemoteFolder) else [mine, others[0]])
    for name in others:
        assert folder.read_part(name).num_rows == 1
