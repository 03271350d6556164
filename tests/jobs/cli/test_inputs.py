"""Any input gives the same rows, and a row at fault spoils no other."""

import gzip
import io
import json
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from ..running import LABELS, MODEL, assert_refused, label_arguments, results, write_lines


def test_bad_rows_are_in_the_data_set_with_their_error(served, headrace, few, tmp_path):
    good = json.loads(few.read_text().splitlines()[0])
    long = {"text": "word " * 3000, "custom_id": "long"}
    lines = [good, "{broken", {"text": None}, "", {"other": 1}, {"text": " "}, long, good]
    arguments = label_arguments(write_lines(tmp_path / "mixed.jsonl", *lines), tmp_path / "out")
    result = headrace(served, *arguments)
    assert result.status == 0, result.err
    assert "7 of 7: 2 generated, 0 kept from before, 5 failed" in result.out
    rows = results(tmp_path / "out").to_pylist()
    assert [row["row"] for row in rows] == list(range(7))
    assert [row["error"] for row in rows] == [
        None,
        "line 2: not valid JSON: Expecting property name enclosed in double quotes at column 2",
        "column 'text' is null",
        "column 'text' is missing",
        "prompt is empty",
        rows[5]["error"],
        None,
    ]
    assert "the model's context holds 2048" in rows[5]["error"]
    assert rows[5]["custom_id"] == "long"
    for row in rows:
        assert (row["label"] is None) == (row["error"] is not None)


def test_a_run_without_a_single_answer_fails(served, headrace, tmp_path):
    arguments = label_arguments(write_lines(tmp_path / "bad.jsonl", {"text": ""}, {"text": " "}), tmp_path / "out")
    result = headrace(served, *arguments)
    assert result.status == 1
    assert "2 failed" in result.out


@pytest.fixture(scope="module")
def formats(few, tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("formats")
    table = pa.Table.from_pylist([json.loads(line) for line in few.read_text().splitlines()])
    pq.write_table(table, folder / "few.parquet")
    pa.csv.write_csv(table, folder / "few.csv")
    packed = folder / "few.jsonl.gz"
    packed.write_bytes(gzip.compress(few.read_bytes()))
    several = folder / "several"
    several.mkdir()
    for name, part in (("a", table.slice(0, 7)), ("b", table.slice(7))):
        pq.write_table(part, several / f"{name}.parquet")
    formats = {"jsonl": few, "csv": folder / "few.csv", "parquet": folder / "few.parquet"}
    return {**formats, "gzip": packed, "folder": several}


def test_the_format_of_the_input_does_not_matter(served, headrace, formats, tmp_path):
    tables = {}
    for name, path in formats.items():
        assert headrace(served, *label_arguments(path, tmp_path / name)).status == 0
        tables[name] = results(tmp_path / name)
    first = tables.pop("jsonl")
    assert first.column_names[:5] == ["row", "custom_id", "ticket_id", "text", "category"]
    assert set(first["label"].to_pylist()) <= set(LABELS)
    for table in tables.values():
        assert table.column_names == first.column_names
        for column in ("row", "ticket_id", "text", "category", "label", "prompt_tokens", "error"):
            assert table[column].to_pylist() == first[column].to_pylist()


@pytest.fixture
def shop_database(few, tmp_path) -> str:
    """A database with the same tickets."""
    with closing(sqlite3.connect(tmp_path / "shop.db")) as database, database:
        database.execute("create table tickets (ticket_id text, text text)")
        rows = [json.loads(line) for line in few.read_text().splitlines()]
        database.executemany("insert into tickets values (:ticket_id, :text)", rows)
    return f"sqlite:///{tmp_path / 'shop.db'}"


def test_rows_from_a_pipe_and_from_a_query(served, headrace, few, shop_database, tmp_path, monkeypatch):
    def labels(name: str, *arguments: str) -> list[str]:
        command, _, *options = label_arguments(few, tmp_path / name)
        result = headrace(served, command, *options, *arguments)
        assert result.status == 0, result.err
        return results(tmp_path / name)["label"].to_pylist()

    expected = labels("file", str(few))
    with few.open() as piped, monkeypatch.context() as patch:
        patch.setattr(sys, "stdin", piped)
        assert labels("pipe", "-") == expected
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
        assert_refused(
            headrace(served, "run", "-", "--model", MODEL, "--output", tmp_path / "x"), "input - has no rows"
        )
        patch.setattr(sys, "stdin", None)
        assert_refused(
            headrace(served, "run", "-", "--model", MODEL, "--output", tmp_path / "x"), "standard input is closed"
        )
    query = write_lines(tmp_path / "query.sql", "select ticket_id, text from tickets order by rowid")
    assert labels("query", "--sql", shop_database, "--query", f"@{query}") == expected
    assert not list((served / "inputs").glob("*"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["pass an INPUT, or --sql and --query"]),
        (["rows.csv", "--sql", "sqlite://", "--query", "select 1"], ["one of the two"]),
        (["--sql", "sqlite://"], ["--sql and --query belong together"]),
        (["--sql", "sqlite://", "--query", "select * from nothing"], ["--query failed", "nothing"]),
        (["--sql", "sqlite://", "--query", "@nowhere.sql"], ["--query @nowhere.sql cannot be read"]),
        (["nosuch://host/rows.csv"], ["nosuch://host/rows.csv", "Protocol not known"]),
    ],
)
def test_an_input_that_cannot_be_told_is_refused(served, headrace, tmp_path, arguments, words):
    options = ["--model", MODEL, "--prompt", "{text}", "--output", tmp_path / "out"]
    assert_refused(headrace(served, "run", *arguments, *options), *words)
    assert not (tmp_path / "out").exists()
