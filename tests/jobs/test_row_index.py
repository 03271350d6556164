"""Pages of a job's rows: each row once, in order, from the parts that hold it."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.jobs.row_events import StoredRow, StoredRows, _Output
from headrace.jobs.row_index import RowIndex, RowIndexes
from headrace.storage.ledger import Ledger
from headrace.storage.local_folder import LocalFolder
from headrace.storage.parts import part_summary
from headrace.storage.records import Claim, JobRecord, NewJob, NewPart, NewShard, PartRecord, Replacement

NUM_ROWS, NUM_PARTS = 300, 20


@dataclass
class RunningJob:
    """One whose rows are committed by hand, in parts of rows from anywhere in the input."""

    ledger: Ledger
    folder: LocalFolder
    claim: Claim
    left: list[int] = field(default_factory=lambda: random.Random(7).sample(range(NUM_ROWS), NUM_ROWS))
    num_parts: int = 0

    @property
    def record(self) -> JobRecord:
        return self.ledger.job(self.claim.job_id)

    @property
    def parts(self) -> list[PartRecord]:
        return self.ledger.parts(self.claim.job_id)

    def commit(self) -> list[int]:
        """One more part; returns its rows."""
        rows = [self.left.pop() for _ in range(NUM_ROWS // NUM_PARTS)]
        part = self.written(rows)
        self.ledger.leases.commit_part(self.claim, part)
        self.folder.publish(part.file_name)
        return rows

    def written(self, rows: list[int], text: str = "row") -> NewPart:
        self.num_parts += 1
        name = f"part-00000-01-{self.num_parts:03d}.parquet"
        tokens = {"prompt_tokens": rows, "cached_tokens": rows, "completion_tokens": rows}
        none = dict.fromkeys(("finish_reason", "error"), pa.nulls(len(rows), pa.string()))
        table = pa.table({"row": rows, "output": [f"{text} {row}" for row in rows], **tokens, **none})
        self.folder.write_part(name, table)
        return part_summary(name, table)

    def retry(self, old: PartRecord) -> list[int]:
        """Two rows of a part are answered again, it gives way to one without them; returns these rows."""
        again, rest = self.rows_of(old)[:2], self.rows_of(old)[2:]
        answered, remaining = self.written(again, "again"), self.written(rest)
        self.ledger.leases.commit_part(self.claim, answered, [Replacement(old.id, remaining)])
        self.folder.withdraw(old.file_name)
        self.folder.publish(remaining.file_name)
        self.folder.publish(answered.file_name)
        return again

    def rows_of(self, part: PartRecord) -> list[int]:
        rows: list[int] = pq.read_table(self.folder.path / part.file_name)["row"].to_pylist()
        return rows


@pytest.fixture
def job(tmp_path: Path) -> Iterator[RunningJob]:
    ledger = Ledger(f"sqlite:///{tmp_path / 'ledger.db'}")
    ledger.migrate()
    folder = LocalFolder(tmp_path / "out")
    folder.make()
    new = NewJob("job_1", "bulk", "tiny", str(folder), "abc", NUM_ROWS, {"max_tokens": 1}, 0)
    ledger.create_job(new, [NewShard(0, NUM_ROWS, "/spool/0.parquet")])
    claim = ledger.leases.claim_next("bulk", "worker", 3600)
    assert claim is not None
    yield RunningJob(ledger, folder, claim)
    ledger.close()


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the parts that were opened."""
    names: list[str] = []
    open_part: Callable[[LocalFolder, str], pq.ParquetFile] = LocalFolder.open_part

    def noted(folder: LocalFolder, name: str) -> pq.ParquetFile:
        names.append(name)
        return open_part(folder, name)

    monkeypatch.setattr(LocalFolder, "open_part", noted)
    return names


def pages(index: RowIndex, job: RunningJob, limit: int) -> list[int]:
    """All rows, a page after the other."""
    rows: list[int] = []
    has_more = True
    while has_more:
        found = index.first_rows(job.ledger, job.record, limit, rows[-1] if rows else None)
        assert len(found.table) == limit or not found.has_more
        rows += found.table["row"].to_pylist() if len(found.table) else []
        has_more = found.has_more
    return rows


@pytest.mark.parametrize("limit", [1, 7, 15, 1000])
def test_pages_have_what_is_committed_by_now(job: RunningJob, limit: int) -> None:
    index = RowIndex()
    assert pages(index, job, limit) == []
    committed: list[int] = []
    for _ in range(NUM_PARTS):
        committed += job.commit()
        if len(committed) % 75 == 0:
            assert pages(index, job, limit) == sorted(committed)
    job.ledger.leases.finish_shard(job.claim)
    assert pages(index, job, limit) == list(range(NUM_ROWS))


def test_a_page_reads_the_parts_that_hold_it(job: RunningJob, opened: list[str]) -> None:
    index = RowIndex()
    for _ in range(NUM_PARTS):
        job.commit()
    job.ledger.leases.finish_shard(job.claim)
    index.first_rows(job.ledger, job.record, 3)
    for after in (0, 99, 200):
        opened.clear()
        found = index.first_rows(job.ledger, job.record, 3, after)
        assert found.table["output"].to_pylist() == [f"row {row}" for row in range(after + 1, after + 4)]
        assert len(opened) <= 3


def test_a_part_that_was_removed_by_hand_is_left_out(job: RunningJob) -> None:
    index = RowIndex()
    for _ in range(NUM_PARTS):
        job.commit()
    job.ledger.leases.finish_shard(job.claim)
    assert pages(index, job, 50) == list(range(NUM_ROWS))
    gone = set(job.rows_of(job.parts[3]))
    (job.folder.path / job.parts[3].file_name).unlink()
    left = [row for row in range(NUM_ROWS) if row not in gone]
    assert pages(index, job, 50) == pages(RowIndex(), job, 50) == left


def test_a_part_that_is_back_is_read_again(job: RunningJob) -> None:
    """As when its disk was away for a while."""
    index = RowIndex()
    for _ in range(NUM_PARTS):
        job.commit()
    job.ledger.leases.finish_shard(job.claim)
    path = job.folder.path / job.parts[3].file_name
    away = path.rename(job.folder.path / "away")
    assert len(pages(index, job, 50)) < NUM_ROWS
    away.rename(path)
    assert pages(index, job, 50) == list(range(NUM_ROWS))


def test_the_id_of_a_part_that_is_gone_may_be_another_ones(job: RunningJob) -> None:
    index = RowIndex()
    first = job.commit()
    assert pages(index, job, 7) == sorted(first)
    (old,) = job.parts
    job.ledger.leases.drop_part(job.claim, old.id)
    job.folder.withdraw(old.file_name)
    second = job.commit()
    assert [part.id for part in job.parts] == [old.id]
    assert pages(index, job, 7) == sorted(second)


def test_the_answers_of_a_retry_take_their_place(job: RunningJob) -> None:
    index = RowIndex()
    for _ in range(3):
        job.commit()
    rows = pages(index, job, 50)
    again = job.retry(job.parts[1])
    assert pages(index, job, 7) == rows
    found = index.first_rows(job.ledger, job.record, 1, min(again) - 1)
    assert found.table["output"].to_pylist() == [f"again {min(again)}"]


def test_a_part_that_gives_way_while_it_is_looked_for_takes_no_row_with_it(
    job: RunningJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = sorted(job.commit() + job.commit())
    old = job.parts[0]
    open_part = LocalFolder.open_part

    def retried(folder: LocalFolder, name: str) -> pq.ParquetFile:
        if name == old.file_name and old in job.parts:
            job.retry(old)
        return open_part(folder, name)

    monkeypatch.setattr(LocalFolder, "open_part", retried)
    assert pages(RowIndex(), job, 50) == rows


def test_who_watches_a_row_finds_it_in_a_part_that_was_committed_out_of_turn(
    job: RunningJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two that commit at a time the second may have taken its id first."""
    row = job.commit()[0]
    job.commit()
    watched = StoredRow(StoredRows(job.ledger), job.record.id, row)
    monkeypatch.setattr(StoredRows, "output", lambda rows, job_id: _Output(job.record, job.parts[1:]))
    assert watched.find() == (None, True)
    job.ledger.leases.finish_shard(job.claim)
    monkeypatch.setattr(StoredRows, "output", StoredRows._read)
    found, may_come = watched.find()
    assert found is not None
    assert (found["output"], may_come) == (f"row {row}", False)


def test_the_jobs_that_were_read_last_are_remembered(job: RunningJob) -> None:
    job.commit()
    indexes = RowIndexes(max_rows=NUM_ROWS // 2)
    first = indexes.of("job_1")
    first.first_rows(job.ledger, job.record, 1)
    assert indexes.of("job_1") is first
    indexes.of("job_2")
    assert indexes.of("job_1") is not first


def test_no_more_than_some_jobs_are_remembered() -> None:
    indexes = RowIndexes(max_jobs=2)
    first, second = indexes.of("job_1"), indexes.of("job_2")
    assert indexes.of("job_1") is first
    indexes.of("job_3")
    assert indexes.of("job_1") is first
    assert indexes.of("job_2") is not second
