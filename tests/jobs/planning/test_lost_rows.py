"""Rows whose files are gone are made again when their job is resumed: each is there once, and the others stay."""

import json
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from redis import Redis
from sqlalchemy import delete

from headrace.jobs.client.client import Client, Job
from headrace.jobs.errors import JobMismatchError
from headrace.jobs.planning import producer
from headrace.jobs.planning.lost_rows import LostRows
from headrace.jobs.planning.producer import Producer
from headrace.jobs.results.row_index import RowIndex
from headrace.jobs.shards.finishing import finish_job
from headrace.storage.errors import PartDamaged
from headrace.storage.ledger.records import JobRecord, JobState
from headrace.storage.ledger.tables import parts as parts_table
from headrace.storage.output import held_file
from headrace.storage.output.address import open_folder
from headrace.storage.output.manifest import read_report
from headrace.storage.readers import open_sql
from headrace.storage.rows import planned_rows
from headrace.storage.rows.spool import read_shard

from ...storage.ledger.claiming import claimed
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
    # As an attempt does that finds the file of its own part gone.
    with client.ledger.database.write() as connection:
        connection.execute(delete(parts_table).where(parts_table.c.file_name == lost[0].name))

    damaged = next(part for part in parts if part not in lost)
    there = damaged.read_bytes()
    damaged.write_bytes(b"")
    with pytest.raises(PartDamaged, match=f"^part {damaged} cannot be read: .*: remove it, and run --resume"):
        submit(client, out, "resume")
    damaged.write_bytes(there)

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


def test_they_are_asked_what_they_were_whatever_the_time_is(
    unserved: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_whole = Producer._made_whole

    def twice(*asked: Any) -> JobRecord:
        """As of two that resume at once: the second has seen that the job had completed."""
        made_whole(*asked)
        return made_whole(*asked)

    timed = shutil.copytree(MODEL, tmp_path / "timed")
    template = "{{ strftime_now('%M %S %f') }} {{ messages[0].content }}"
    (timed / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    rows, out, redis = ROWS[:3], tmp_path / "out", Redis.from_url(unserved.redis_url)

    def submit(mode: str) -> Job:
        return unserved.submit(rows, timed, out, mode=mode, idempotency_key="nightly", **ASKED)

    job, ledger = submit("new"), unserved.ledger
    queue = job.record.queue
    [shard] = ledger.shards(job.id)
    planned = read_shard(Path(shard.spool_path))
    # As of a job whose parts have all been found gone.
    assert ledger.leases.finish_shard(claimed(ledger, shard.id)) is JobState.COMPLETED
    finish_job(ledger, ledger.job(job.id))
    assert "state" in (read_report(open_folder(out)) or {})
    redis.delete(*redis.keys(f"{queue}*"))

    def late(*asked: Any) -> None:
        """A worker's, for whom the job has only just completed."""
        finish_job(ledger, ledger.job(job.id))
        planned_rows.plan_anew(*asked)

    monkeypatch.setattr(Producer, "_made_whole", twice)
    monkeypatch.setattr(producer, "plan_anew", late)
    assert submit("resume").record.state is JobState.RUNNING
    [done, again] = ledger.shards(job.id)
    assert (done.id, again.number) == (shard.id, 1)
    assert read_shard(path := Path(again.spool_path)).equals(planned)
    assert list(path.parent.iterdir()) == [path]
    assert "state" not in (read_report(open_folder(out)) or {})
    assert redis.keys(f"{queue}*")


def test_nobody_else_takes_the_folder_while_they_are_looked_for(
    unserved: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def submit(mode: str) -> Job:
        return unserved.submit(ROWS[:1], MODEL, tmp_path / "out", mode=mode, **ASKED)

    job = submit("new")
    unserved.ledger.leases.finish_shard(claimed(unserved.ledger, f"{job.id}/00000"))
    monkeypatch.setattr(held_file, "_PATIENCE_SECONDS", 0.1)
    monkeypatch.setattr(LostRows, "of", lambda *asked: submit("overwrite"))
    with pytest.raises(JobMismatchError, match="being submitted by another process"):
        submit("resume")


def test_a_data_set_that_is_replaced_meanwhile_is_left_alone(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new, made_whole = submit(client, tmp_path / "out", "new"), [], Producer._made_whole

    def replaced(*asked: Any) -> JobRecord:
        new.append(client.submit(ROWS[:1], MODEL, tmp_path / "out", mode="overwrite", **ASKED))
        return made_whole(*asked)

    monkeypatch.setattr(Producer, "_made_whole", replaced)
    finished_at = client.ledger.job(old.id).finished_at
    assert submit(client, tmp_path / "out", "resume").record.finished_at == finished_at
    new[0].wait(SECONDS, start_worker=False)


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
