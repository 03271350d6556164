"""Pages of a job's rows: each row once, in order, from the parts that hold it."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

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
        errors = pa.nulls(len(rows), pa.string())
        table = pa.table({"row": rows, "output": [f"{text} {row}" for row in rows], **tokens, "error": errors})
        self.folder.write_part(name, table)
        return part_summary(name, table)

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


def test_the_answers_of_a_retry_take_their_place(job: RunningJob) -> None:
    """A part gives way to one without some of its rows, which another part has by then."""
    index = RowIndex()
    for _ in range(3):
        job.commit()
    rows = pages(index, job, 50)
    old = job.parts[1]
    again, rest = job.rows_of(old)[:2], job.rows_of(old)[2:]
    answered, remaining = job.written(again, "again"), job.written(rest)
    job.ledger.leases.commit_part(job.claim, answered, [Replacement(old.id, remaining)])
    job.folder.withdraw(old.file_name)
    job.folder.publish(remaining.file_name)
    job.folder.publish(answered.file_name)
    assert pages(index, job, 7) == rows
    found = index.first_rows(job.ledger, job.record, 1, min(again) - 1)
    assert found.table["output"].to_pylist() == [f"again {min(again)}"]


def test_the_jobs_that_were_read_last_are_remembered(job: RunningJob) -> None:
    job.commit()
    indexes = RowIndexes(max_rows=NUM_ROWS // 2)
    first = indexes.of("job_1")
    first.first_rows(job.ledger, job.record, 1)
    assert indexes.of("job_1") is first
    indexes.of("job_2")
    assert indexes.of("job_1") is not first
