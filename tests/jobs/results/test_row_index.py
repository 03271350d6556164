"""Pages of a job's rows: each row once, in order, from the parts that hold it."""

import random
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.jobs.results.row_events import StoredRow, WatchedOutputs, _Output
from headrace.jobs.results.row_index import RowIndex, RowIndexes
from headrace.storage.ledger.ledger import Ledger
from headrace.storage.ledger.records import Claim, JobRecord, NewJob, NewPart, NewShard, PartRecord, Replacement
from headrace.storage.output.local_folder import LocalFolder
from headrace.storage.output.parts import part_summary
from headrace.storage.rows.planned_rows import PLANNED_ROWS, plan_anew, planned_rows
from headrace.storage.rows.spool import PlannedRow, write_shard

NUM_ROWS, NUM_PARTS, NUM_SHARDS = 300, 20, 5
SHARD_ROWS = NUM_ROWS // NUM_SHARDS


@dataclass
class RunningJob:
    """One whose rows are committed by hand, in parts of rows from anywhere in the input.

    The rows of `left` are planned: each fifth of them is a shard.
    """

    ledger: Ledger
    folder: LocalFolder
    claim: Claim
    left: list[int] = field(default_factory=lambda: random.Random(7).sample(range(NUM_ROWS), NUM_ROWS))
    num_parts: int = 0

    def __post_init__(self) -> None:
        self.shards = [self.left[start : start + SHARD_ROWS] for start in range(0, NUM_ROWS, SHARD_ROWS)]

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

    def written(self, rows: list[int], text: str = "row", shard: int | None = None) -> NewPart:
        self.num_parts += 1
        if shard is None:
            shard = next(number for number, planned in enumerate(self.shards) if rows[0] in planned)
        name = f"part-{shard:05d}-01-{self.num_parts:03d}.parquet"
        tokens = {"prompt_tokens": rows, "cached_tokens": rows, "completion_tokens": rows}
        none = dict.fromkeys(("finish_reason", "error"), pa.nulls(len(rows), pa.string()))
        table = pa.table({"row": rows, "output": [f"{text} {row}" for row in rows], **tokens, **none})
        self.folder.write_part(name, table)
        return part_summary(name, table)

    def retry(self, old: PartRecord, shard: int | None = None) -> list[int]:
        """Two rows of a part are answered again, it gives way to one without them; returns these rows."""
        again, rest = self.rows_of(old)[:2], self.rows_of(old)[2:]
        answered, remaining = self.written(again, "again", shard), self.written(rest, shard=shard)
        self.ledger.leases.commit_part(self.claim, answered, [Replacement(old, remaining)])
        self.folder.withdraw(old.file_name)
        self.folder.publish(remaining.file_name)
        self.folder.publish(answered.file_name)
        return again

    def complete(self) -> None:
        claim: Claim | None = self.claim
        while claim is not None:
            self.ledger.leases.finish_shard(claim)
            claim = self.ledger.leases.claim_next("bulk", "worker", 3600)

    def rows_of(self, part: PartRecord) -> list[int]:
        rows: list[int] = pq.read_table(self.folder.path / part.file_name)["row"].to_pylist()
        return rows


@pytest.fixture(params=["planned", "unplanned"])
def job(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningJob]:
    ledger = Ledger(f"sqlite:///{tmp_path / 'ledger.db'}")
    ledger.migrate()
    folder = LocalFolder(tmp_path / "out")
    folder.make()
    new = NewJob("job_1", "bulk", "tiny", str(folder), "abc", NUM_ROWS, {"max_tokens": 1}, 0)
    spool = tmp_path / "spool"
    spool.mkdir()
    shards = [NewShard(number, SHARD_ROWS, str(spool / f"{number}.parquet")) for number in range(NUM_SHARDS)]
    ledger.create_job(new, shards)
    claim = ledger.leases.claim_next("bulk", "worker", 3600)
    assert claim is not None
    job = RunningJob(ledger, folder, claim)
    if request.param == "planned":
        monkeypatch.setattr("headrace.storage.rows.planned_rows._FEW_SHARDS", 0)
        with planned_rows(spool) as planned:
            for number, rows in enumerate(job.shards):
                planned.add(number, array("q", rows))
    yield job
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
        if len(committed) == NUM_ROWS // 2:
            assert pages(index, job, limit) == sorted(committed)
    job.complete()
    assert pages(index, job, limit) == list(range(NUM_ROWS))


def test_a_page_reads_the_parts_that_hold_it(job: RunningJob, opened: list[str]) -> None:
    index = RowIndex()
    for _ in range(NUM_PARTS):
        job.commit()
    job.complete()
    assert pages(index, job, 50) == list(range(NUM_ROWS))
    for after in (0, 99, 200):
        opened.clear()
        found = index.first_rows(job.ledger, job.record, 3, after)
        assert found.table["output"].to_pylist() == [f"row {row}" for row in range(after + 1, after + 4)]
        assert len(opened) <= 3


@pytest.mark.parametrize("job", ["planned"], indirect=True)
def test_the_first_page_reads_no_part_of_other_shards(job: RunningJob, opened: list[str]) -> None:
    for _ in range(NUM_PARTS):
        job.commit()
    job.complete()
    index = RowIndex()
    for row in (0, 150, 299):
        opened.clear()
        found = index.first_rows(job.ledger, job.record, 1, row - 1)
        assert found.table["row"].to_pylist() == [row]
        wanted = [number for number, rows in enumerate(job.shards) if {row, row + 1}.intersection(rows)]
        assert {int(name.split("-")[1]) for name in opened} <= set(wanted)


@pytest.mark.parametrize("job", ["planned"], indirect=True)
@pytest.mark.parametrize("damage", [b"", b"no Parquet", None])
def test_where_the_plan_cannot_be_read_all_parts_are(job: RunningJob, damage: bytes | None, tmp_path: Path) -> None:
    (plan,) = tmp_path.rglob(PLANNED_ROWS)
    if damage is None:
        plan.unlink()
    else:
        plan.write_bytes(damage)
    committed = [row for _ in range(3) for row in job.commit()]
    assert pages(RowIndex(), job, 7) == sorted(committed)


def test_rows_that_another_shard_tries_again_are_those_of_the_first(job: RunningJob) -> None:
    """The number in its parts' names is its own."""
    for _ in range(NUM_PARTS):
        job.commit()
    job.complete()
    index = RowIndex()
    assert pages(index, job, 50) == list(range(NUM_ROWS))
    old = job.parts[2]
    retried = int(old.file_name.split("-")[1])
    new = NewShard(NUM_SHARDS, 2, "/spool/0.parquet", retry_of=retried)
    assert job.ledger.retry_job("job_1", [new])
    claim = job.ledger.leases.claim_next("bulk", "worker", 3600)
    assert claim is not None
    job.claim = claim
    again = job.retry(old, claim.shard_number)
    job.complete()
    for pages_of in (index, RowIndex()):
        assert pages(pages_of, job, 50) == list(range(NUM_ROWS))
        found = pages_of.first_rows(job.ledger, job.record, 1, min(again) - 1)
        assert found.table["output"].to_pylist() == [f"again {min(again)}"]


def test_a_retry_is_found_too_where_lost_rows_were_planned_after_it(job: RunningJob) -> None:
    for _ in range(NUM_PARTS):
        job.commit()
    job.complete()
    spool = job.ledger.spool_folder("job_1")
    assert spool is not None
    index = RowIndex()
    old, lost = job.parts[2], job.parts[5]
    rows, path = job.rows_of(lost), spool / "again.parquet"
    write_shard(path, [PlannedRow(row, str(row), {}, [1], None) for row in rows], pa.schema([]))

    def take(new: NewShard, lost: Sequence[PartRecord] = ()) -> None:
        assert job.ledger.retry_job("job_1", [new], lost)
        claim = job.ledger.leases.claim_next("bulk", "worker", 3600)
        assert claim is not None
        job.claim = claim

    take(NewShard(NUM_SHARDS, 2, str(spool / "0.parquet"), retry_of=int(old.file_name.split("-")[1])))
    job.retry(old, NUM_SHARDS)
    job.complete()
    job.folder.withdraw(lost.file_name)
    assert pages(index, job, 50) == sorted({*range(NUM_ROWS)} - {*rows})
    plan_anew(spool, NUM_ROWS, {NUM_SHARDS + 1: path})
    take(NewShard(NUM_SHARDS + 1, len(rows), str(path)), [lost])
    part = job.written(rows, shard=NUM_SHARDS + 1)
    job.ledger.leases.commit_part(job.claim, part)
    job.folder.publish(part.file_name)
    for pages_of in (index, RowIndex()):
        assert pages(pages_of, job, 50) == list(range(NUM_ROWS))


def test_a_part_that_was_removed_by_hand_is_left_out(job: RunningJob) -> None:
    index = RowIndex()
    for _ in range(NUM_PARTS):
        job.commit()
    job.complete()
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
    job.complete()
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
    watched = StoredRow(WatchedOutputs(job.ledger), job.record.id, row)
    monkeypatch.setattr(WatchedOutputs, "output", lambda rows, job_id: _Output(job.record, job.parts[1:]))
    assert watched.find() == (None, True)
    job.complete()
    monkeypatch.setattr(WatchedOutputs, "output", WatchedOutputs._read)
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
