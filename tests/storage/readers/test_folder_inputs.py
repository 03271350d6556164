"""Folders as inputs: several files of one format, and data sets that others have saved."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.storage.errors import InputError
from headrace.storage.readers import open_input
from headrace.storage.rows.columns import SchemaUnifier, column_array


def write(folder: Path, name: str, content: str | bytes) -> None:
    (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)


def test_a_folder_of_text_files_is_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    write(tmp_path, "b.jsonl", '{"a": 3}\n{\n')
    write(tmp_path, "a.jsonl", '{"a": 1}\n{"b": 2}\n')
    write(tmp_path, "_SUCCESS", "")
    write(tmp_path, ".hidden.csv", "")
    write(tmp_path, "notes.txt", "")
    source = open_input(tmp_path)
    first, second, third, bad = source
    assert [row.row for row in (first, second, third, bad)] == [0, 1, 2, 3]
    assert [row.values for row in (first, second, third)] == [{"a": 1}, {"b": 2}, {"a": 3}]
    assert bad.error == f"{tmp_path}/b.jsonl: line 2: not valid JSON: {bad.error.rpartition('JSON: ')[2]}"
    assert source.columns == ["a", "b"]
    assert len(list(open_input(tmp_path, 3))) == 3


def test_a_folders_fingerprint_tells_its_content_and_order(tmp_path: Path) -> None:
    for folder, names in (("one", "ab"), ("same", "ab"), ("turned", "ba"), ("less", "a")):
        (tmp_path / folder).mkdir()
        for number, name in enumerate(names):
            write(tmp_path / folder, f"{name}.csv", f"n\n{number}\n")
    prints = [open_input(tmp_path / name).fingerprint() for name in ("one", "same", "turned", "less")]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a.csv": "x,y\n1,2\n", "b.csv": "y\n1\n"}, "b.csv has no column 'x', which .*a.csv has: give all files"),
        ({"a.csv": "x\n1\n", "b.csv": "y,x\n1,2\n"}, "a.csv has no column 'y', which .*b.csv has: give all files"),
        ({"a.csv": "x\n1\n", "b.jsonl": "{}\n"}, "several formats .*csv, .jsonl.: keep one"),
        ({"a.csv": "x\n", "b.csv": "x\n"}, "has no rows"),
    ],
)
def test_an_unusable_folder(files: dict[str, str], message: str, tmp_path: Path) -> None:
    for name, content in files.items():
        write(tmp_path, name, content)
    with pytest.raises(InputError, match=message):
        open_input(tmp_path)


def test_a_folder_whose_folders_would_be_left_out(tmp_path: Path) -> None:
    write(tmp_path, "a.csv", "x\n1\n")
    for name, file in ((".hidden", "b.csv"), ("logs", "b.jsonl"), ("out", "b.csv"), ("out", "_headrace.json")):
        (tmp_path / name).mkdir(exist_ok=True)
        write(tmp_path / name, file, "x\n2\n")
    assert len(list(open_input(tmp_path))) == 1
    (tmp_path / "more").mkdir()
    write(tmp_path / "more", "b.csv.gz", gzip.compress(b"x\n2\n"))
    with pytest.raises(InputError, match=r"has \.csv files in its folder more too, which would not be read: put all"):
        open_input(tmp_path)
    (tmp_path / "a.csv").unlink()
    with pytest.raises(InputError, match=r"has no file that ends in .*; folders within are not read, name one of logs"):
        open_input(tmp_path)


def test_a_folder_of_parquet_files(tmp_path: Path) -> None:
    for number in range(3):
        pq.write_table(pa.table({"n": [number, number]}), tmp_path / f"{number}.parquet")
    assert [(row.row, row.values["n"]) for row in open_input(tmp_path)] == list(enumerate([0, 0, 1, 1, 2, 2]))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (pa.table({"n": ["x"], "m": [1]}), "b.parquet: column 'n' is string, in .*a.parquet it is int64"),
        (pa.table({"n": [b"x"], "m": [1]}), "b.parquet: column 'n' is binary, in .*a.parquet it is int64"),
        (pa.table({"n": [1]}), "b.parquet: column 'm' is missing, in .*a.parquet it is int64"),
        (pa.table({"n": [1], "m": [1], "k": [1]}), "b.parquet: column 'k' is int64, in .*a.parquet it is missing"),
    ],
)
def test_parquet_files_whose_columns_differ_are_refused(other: pa.Table, message: str, tmp_path: Path) -> None:
    pq.write_table(pa.table({"n": [1], "m": [1]}), tmp_path / "a.parquet")
    pq.write_table(other, tmp_path / "b.parquet")
    with pytest.raises(InputError, match=message):
        open_input(tmp_path)


def test_an_integer_that_the_column_of_another_file_does_not_hold(tmp_path: Path) -> None:
    pq.write_table(pa.table({"n": [0.5]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"n": [2**53 + 1]}), tmp_path / "b.parquet")
    with pytest.raises(InputError, match=r"b\.parquet: column 'n' has a value that double, its type in other"):
        list(open_input(tmp_path))


@pytest.mark.parametrize(
    ("one", "other", "type_"),
    [
        (pa.nulls(1), pa.array(["x"]), pa.string()),
        (pa.array(["x"]), pa.nulls(1), pa.string()),
        (pa.array(["x"]), pa.array(["y"], pa.large_string()), pa.large_string()),
        (pa.array(["x"]), pa.array(["y"]).dictionary_encode(), pa.string()),
        (pa.array([1], pa.int32()), pa.array([2**40]), pa.int64()),
        (pa.array([[]], pa.list_(pa.null())), pa.array([["x"]]), pa.list_(pa.string())),
        (pa.array([0.5], pa.float32()), pa.array([0.1]), pa.float64()),
    ],
    ids=lambda each: str(each.type) if isinstance(each, pa.Array) else "",
)
def test_types_of_parquet_files_that_fit_into_one(one: pa.Array, other: pa.Array, type_: Any, tmp_path: Path) -> None:
    """As pandas and polars write the shards of one data set."""
    pq.write_table(pa.table({"n": one}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"n": other}), tmp_path / "b.parquet")
    source = open_input(tmp_path)
    assert [row.values["n"] for row in source] == [*one.to_pylist(), *other.to_pylist()]
    assert source.unifier().schema().field("n").type == type_


def test_text_and_bytes_do_not_fit_into_one(tmp_path: Path) -> None:
    pq.write_table(pa.table({"n": ["x"]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"n": [b"x"]}), tmp_path / "b.parquet")
    with pytest.raises(InputError, match=r"column 'n' is binary, in .*a.parquet it is string"):
        open_input(tmp_path)


def test_the_columns_of_a_data_set_of_ours_are_read_as_its_input_had_them(tmp_path: Path) -> None:
    """Else a run over another run's answers would ask for "s" in place of s, and each run would quote it again."""
    rows: list[dict[str, Any]] = [{"mixed": "s", "price": 1}, {"mixed": {"n": 5}, "price": 2.5}]
    unifier = SchemaUnifier()
    for values in rows:
        unifier.observe(values)
    schema = unifier.schema()
    for name in ("a", "b"):
        columns = [column_array([values[field.name] for values in rows], field) for field in schema]
        pq.write_table(pa.table(columns, schema=schema), tmp_path / f"{name}.parquet")
    source = open_input(tmp_path)
    again = [row.values for row in source]
    assert again == rows * 2
    assert type(again[0]["price"]) is int
    assert column_array(["s", None], source.unifier().schema().field("mixed")).to_pylist() == ['"s"', None]


def test_the_order_of_columns_is_no_difference(tmp_path: Path) -> None:
    pq.write_table(pa.table({"n": [1], "m": ["x"]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"m": ["y"], "n": [2]}), tmp_path / "b.parquet")
    assert [row.values for row in open_input(tmp_path)] == [{"n": 1, "m": "x"}, {"n": 2, "m": "y"}]


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("csv", "n,m\n1,x\n", "m,n\ny,2\n"),
        ("jsonl", '{"n": "1", "m": "x"}\n', '{"m": "y", "n": "2"}\n'),
    ],
)
def test_columns_of_text_files_are_told_by_their_names(name: str, first: str, second: str, tmp_path: Path) -> None:
    write(tmp_path, f"a.{name}", first)
    write(tmp_path, f"b.{name}", second)
    source = open_input(tmp_path)
    assert [row.values for row in source] == [{"n": "1", "m": "x"}, {"n": "2", "m": "y"}]
    assert source.columns == ["n", "m"]


def saved_dataset(folder: Path, table: pa.Table) -> Path:
    """As `Dataset.save_to_disk` of `datasets` 4 lays it out, with two shards."""
    folder.mkdir(parents=True)
    names = [f"data-0000{number}-of-00002.arrow" for number in range(2)]
    half = len(table) // 2
    for name, part in zip(names, (table.slice(0, half), table.slice(half)), strict=True):
        with pa.OSFile(str(folder / name), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(part)
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "x", "_split": "train"}
    write(folder, "state.json", json.dumps(state))
    write(folder, "dataset_info.json", "{}")
    return folder


def test_a_data_set_saved_by_hugging_face(tmp_path: Path) -> None:
    table = pa.table({"text": [f"t{n}" for n in range(5000)], "n": range(5000)})
    source = open_input(saved_dataset(tmp_path / "train", table))
    assert [row.values for row in source] == table.to_pylist()
    assert source.unifier().schema() == table.schema


@pytest.mark.parametrize(
    ("column", "kind"),
    [
        (pa.array([{}], pa.struct([])), "struct<>"),
        (pa.array([(1, 2, 3)], pa.month_day_nano_interval()), "month_day_nano_interval"),
    ],
)
def test_what_parquet_has_no_type_for_is_refused_before_any_work(column: pa.Array, kind: str, tmp_path: Path) -> None:
    folder = saved_dataset(tmp_path / "saved", pa.table({"text": ["a"], "more": column}))
    with pytest.raises(InputError, match=f"column 'more' is {kind}, which Parquet does not know: give it another type"):
        open_input(folder)


def test_of_a_saved_dictionary_of_splits_one_must_be_named(tmp_path: Path) -> None:
    saved_dataset(tmp_path / "train", pa.table({"a": [1, 2]}))
    write(tmp_path, "dataset_dict.json", '{"splits": ["train"]}')
    with pytest.raises(InputError, match=f"several splits: name one of {tmp_path}/train"):
        open_input(tmp_path)
