"""Tables in memory, of several libraries, as a file."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.storage.errors import InputError, StorageError
from headrace.storage.readers import open_input
from headrace.storage.readers.tables import is_table, write_table

SCHEMA = pa.schema([("text", pa.string()), ("n", pa.int64())])


class Frame:
    """As polars has it: texts are views, also those of its categories, and come in several batches."""

    def __init__(self, *batches: Sequence[str | None]) -> None:
        self._batches = batches

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        kind = pa.array(["x"], pa.string_view())
        columns = [
            (pa.array(batch, kind.type), pa.DictionaryArray.from_arrays(pa.array([0] * len(batch), pa.uint8()), kind))
            for batch in self._batches
        ]
        table = pa.concat_tables([pa.table(each, ["text", "kind"]) for each in columns])
        return table.__arrow_c_stream__(requested_schema)


def read(table: Any, folder: Path) -> list[dict[str, Any]]:
    assert is_table(table)
    write_table(folder / "rows.parquet", table, "of rows")
    return [row.values for row in open_input(folder / "rows.parquet")]


def dataset() -> Any:
    return datasets.Dataset.from_dict({"text": ["a", "b", "c"], "n": [1, 2, 3]})


@pytest.mark.parametrize(
    ("make", "values"),
    [
        (lambda: pd.DataFrame({"text": ["a", None, float("nan")], "n": [1, 2, 3]}), ["a", None, None]),
        (lambda: pa.table({"text": ["a", None], "n": [1, 2]}), ["a", None]),
        (lambda: pa.table({"text": ["a", "b"], "n": [1, 2]}).to_reader(), ["a", "b"]),
        (lambda: dataset().select([2, 0]), ["c", "a"]),
        (lambda: dataset().to_iterable_dataset(), ["a", "b", "c"]),
        (lambda: Frame(["a", None], ["b"]), ["a", None, "b"]),
    ],
    ids=["pandas", "pyarrow", "a reader", "datasets", "a stream of datasets", "views"],
)
def test_rows_of_a_table(make, values, tmp_path):
    assert [row["text"] for row in read(make(), tmp_path)] == values


def test_what_a_data_set_makes_of_its_rows_is_no_table():
    assert not is_table(dataset().with_transform(lambda rows: {"text": [text.upper() for text in rows["text"]]}))
    assert not is_table(dataset().to_iterable_dataset().map(lambda row: {"more": row["text"]}))


def test_columns_keep_their_types(tmp_path):
    frame = pd.DataFrame({"at": pd.to_datetime(["2026-03-04T00:00:00.000000001"]), "n": [2**60], "raw": [b"\xff"]})
    frame = frame.assign(kind=pd.Categorical(["x"]), tags=[["a"]], few=pd.array([None], dtype="Int8"))
    read(frame.set_index(pd.Index([7], name="id")), tmp_path)
    schema = open_input(tmp_path / "rows.parquet").unifier().schema()
    types = ["timestamp[ns]", "int64", "binary", "dictionary<", "list<", "int8", "int64"]
    assert schema.names == ["at", "n", "raw", "kind", "tags", "few", "id"]
    assert all(str(kind).startswith(name) for kind, name in zip(schema.types, types, strict=True))


def test_the_same_rows_are_the_same_file_in_whatever_batches_they_come(tmp_path):
    texts = [str(number) * 20 for number in range(3000)]
    files = []
    for cut in (1, 1100, 2999):
        write_table(tmp_path / "rows.parquet", Frame(texts[:cut], texts[cut:]), "of rows")
        files.append((tmp_path / "rows.parquet").read_bytes())
    assert files[1:] == files[:-1]


def test_a_table_is_written_a_little_at_a_time(tmp_path):
    def batches() -> Iterator[pa.RecordBatch]:
        for number in range(50):
            assert pa.total_allocated_bytes() - before < 200 * 2**20
            yield pa.record_batch([pa.array(["x" * 2**20] * 16), pa.array([number] * 16)], SCHEMA)

    before = pa.total_allocated_bytes()
    write_table(tmp_path / "rows.parquet", pa.RecordBatchReader.from_batches(SCHEMA, batches()), "of rows")
    assert pq.read_metadata(tmp_path / "rows.parquet").num_rows == 800


def test_many_categories_are_written_once(tmp_path):
    names = [f"a category of the number {number}" for number in range(10_000)]
    write_table(tmp_path / "rows.parquet", pd.DataFrame({"text": pd.Categorical(names)}), "of rows")
    assert [row.values["text"] for row in open_input(tmp_path / "rows.parquet")] == names
    assert (tmp_path / "rows.parquet").stat().st_size < sum(map(len, names))


def broken() -> Iterator[pa.RecordBatch]:
    yield pa.record_batch([pa.array(["a"]), pa.array([1])], SCHEMA)
    raise OSError("the network is away")


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        (
            pd.DataFrame([["a", "b"]], columns=["x", "x"]),
            r"of rows cannot be read: Duplicate column names found: \['x'",
        ),
        (pd.DataFrame({"x": [1, "a"]}), r"Conversion failed for column x with .* one type, or .* to_dict\("),
        (pd.Series(["a"]), r"^input of rows is a column, of the type Series: give its to_frame\(\)$"),
        (pa.RecordBatchReader.from_batches(SCHEMA, broken()), "^input of rows cannot be read: .*the network is away"),
        (
            pa.table({"x": pa.array([(1, 2, 3)], pa.month_day_nano_interval())}),
            "column 'x' is month_day_nano_interval, which Parquet does not know",
        ),
    ],
    ids=["two of one name", "two types", "a column", "a stream that breaks", "a type of Arrow's alone"],
)
def test_what_is_no_table_of_rows_is_told_by_its_column(table, problem, tmp_path):
    with pytest.raises(InputError, match=problem) as refusal:
        write_table(tmp_path / "rows.parquet", table, "of rows")
    assert "\n" not in str(refusal.value)


def test_a_disk_that_takes_nothing_is_no_fault_of_the_rows(tmp_path):
    with pytest.raises(StorageError, match=r"^cannot write ") as refusal:
        write_table(tmp_path, pa.table({"text": ["a"]}), "of rows")
    assert not isinstance(refusal.value, InputError)
