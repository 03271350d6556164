"""Results as programs read them that nobody here wrote: DuckDB, pandas, `datasets`, SQLite and psycopg."""

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pandas as pd
import psycopg
import pytest

from headrace.jobs.client.client import Client
from headrace.jobs.settings import Settings
from headrace.storage.ledger.records import JobState

from ..duck import read_by_duckdb
from ..postgres import new_database, postgres_binaries, running_postgres
from .running import LABELS, MODEL, environment, write_tickets

ROWS, SECONDS = 24, 120.0
COLUMNS = "row, custom_id, text, output, label, confidence, error"


@pytest.fixture(scope="module")
def postgres_url() -> Iterator[str]:
    binaries = postgres_binaries()
    if binaries is None:
        pytest.skip("no PostgreSQL: install it")
    with running_postgres(binaries) as server, new_database(server.url) as url:
        yield url


def labelled(client: Client, tickets: Path, folder: Path, sink: str) -> list[dict[str, Any]]:
    job = client.submit(tickets, MODEL, folder, prompt="{text}", choices=LABELS, sink=sink, sink_table="labels")
    assert job.wait(SECONDS, start_worker=False).state is JobState.COMPLETED
    rows: list[dict[str, Any]] = job.results().select(COLUMNS.split(", ")).to_pylist()
    assert len(rows) == ROWS
    return rows


# `datasets` sorts with an argument that pyarrow deprecates.
@pytest.mark.filterwarnings("ignore:Specifying null_placement:FutureWarning")
def test_everyone_reads_the_same_rows(served, postgres_url, tmp_path):
    tickets = write_tickets(tmp_path / "tickets.jsonl", ROWS)
    asked = [json.loads(line)["text"] for line in tickets.read_text().splitlines()]
    lite = tmp_path / "labels.db"
    with Client(Settings.from_environment(environment(served))) as client:
        rows = labelled(client, tickets, tmp_path / "a", f"sqlite:///{lite}")
        again = labelled(client, tickets, tmp_path / "b", postgres_url)
    # Of other batches, with the prefix computed before: its last digits may be others.
    assert [row["confidence"] for row in again] == pytest.approx([row["confidence"] for row in rows], abs=1e-4)
    assert [row["label"] for row in again] == [row["label"] for row in rows]
    assert [row["text"] for row in rows] == asked
    assert {row["label"] for row in rows} <= set(LABELS)
    parts = [str(path) for path in sorted((tmp_path / "a").glob("*.parquet"))]
    expected = [tuple(row.values()) for row in rows]
    query = f"select {COLUMNS} from {{}} order by row"
    assert read_by_duckdb(query.format(f"'{tmp_path}/a/*.parquet'")) == expected
    frame = pd.concat(map(pd.read_parquet, parts)).sort_values("row")
    assert frame["label"].tolist() == [row["label"] for row in rows]
    assert frame["confidence"].tolist() == [row["confidence"] for row in rows]
    loaded = datasets.load_dataset("parquet", data_files=parts, cache_dir=str(tmp_path / "cache"), split="train")
    assert loaded.sort("row").select_columns(COLUMNS.split(", ")).to_list() == rows
    query = f'select {COLUMNS.replace("row", chr(34) + "row" + chr(34), 1)} from labels order by "row"'
    with sqlite3.connect(lite) as connection:
        assert connection.execute(query).fetchall() == expected
    with psycopg.connect(postgres_url) as connection:
        assert connection.execute(query).fetchall() == [tuple(row.values()) for row in again]
