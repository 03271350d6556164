"""Rows whose files are gone are made again when their job is resumed: each is there once, and the others stay."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from headrace.jobs.client.client import Client, Job
from headrace.jobs.errors import JobMismatchError
from headrace.jobs.results.row_index import RowIndex
from headrace.storage.ledger.records import JobState
from headrace.storage.readers import open_sql
from headrace.storage.rows import planned_rows

from ..running import LABELS, MODEL

NUM_ROWS, SHARD_ROWS, SECONDS = 30, 4, 90
# The second of two rows with one id is at fault, and in the data set all the same.
ROWS = [
    {"custom_id": f"ticket {7 if row == 19 else row}", "text": f"Where is parcel {row}?"} for row in range(NUM_ROWS)
]
ASKED: dict[str, Any] = {"prompt": "{text}", "choices": LABELS}


@pytest.fixture
def client(client: Client) -> Iterator[Client]:
    """Whose jobs have several shards."""
    with Client(client.settings.model_copy(update={"shard_rows": SHARD_ROWS})) as cutting:
        yield cutting


def submit(client: Client, output: Path, mode: str) -> Job:
    job = client.submit(ROWS, MODEL, output, mode=mode, **ASKED)
    assert job.wait(SECONDS, start_worker=False).state is JobState.COMPLETED
    return job


def answers(job: Job) -> list[dict[str, Any]]:
    return job.results().select(["row", "custom_id", "text", "label", "error"]).to_pylist()


def rows_of(output: Path) -> dict[Path, list[int]]:
    return {part: pq.read_table(part)["row"].to_pylist() for part in output.glob("*.parquet")}


@pytest.mark.parametrize("most_unplanned", [0, 64], ids=["planned", "unplanned"])
def test_rows_of_lost_files_are_made_again(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_unplanned: int
) -> None:
    monkeypatch.setattr(planned_rows, "_FEW_SHARDS", most_unplanned)
    out = tmp_path / "out"
    job = submit(client, out, "new")
    before = answers(job)
    assert [row["row"] for row in before if row["error"]] == [19]
    index = RowIndex()
    assert len(index.first_rows(client.ledger, job.record, NUM_ROWS).table) == NUM_ROWS
    parts = rows_of(out)
    lost = [part for part, rows in parts.items() if {2, 19, 28} & set(rows)]
    assert len(parts) > len(lost) > 1
    for part in lost:
        part.unlink()

    again = submit(client, out, "resume")
    assert again.id == job.id
    assert again.progress().rows_done == NUM_ROWS
    assert answers(again) == before
    found = rows_of(out)
    assert sorted(row for rows in found.values() for row in rows) == list(range(NUM_ROWS))
    assert parts.keys() - found.keys() == set(lost)
    # Who has read the job before sees them too.
    page = index.first_rows(client.ledger, again.record, NUM_ROWS).table
    assert page["row"].to_pylist() == list(range(NUM_ROWS))
    assert RowIndex().first_rows(client.ledger, again.record, 1, 27).table["row"].to_pylist() == [28]

    submit(client, out, "resume")
    assert rows_of(out) == found


def test_those_of_a_query_are_not(client: Client, tmp_path: Path) -> None:
    """It may have other rows by now."""
    database, out = tmp_path / "tickets.db", tmp_path / "out"
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("CREATE TABLE tickets (text TEXT)")
        connection.execute("INSERT INTO tickets VALUES ('It is late.')")

    def submit(mode: str) -> Job:
        source = open_sql(f"sqlite:///{database}", "SELECT text FROM tickets")
        return client.submit(source, MODEL, out, mode=mode, **ASKED)

    submit("new").wait(SECONDS, start_worker=False)
    assert submit("resume").progress().rows_done == 1
    [part] = out.glob("*.parquet")
    part.unlink()
    with pytest.raises(JobMismatchError, match=f"{part} is gone, and input of the query may have other rows by now: "):
        submit("resume")
