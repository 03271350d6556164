"""Failed rows tried again: in the same data set, each row there once however the attempt ends."""

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.engine.request import Request
from headrace.jobs.client.verbs import retry_job
from headrace.jobs.errors import NotRetriable
from headrace.jobs.hosting.outcomes import Outcome, Refusal
from headrace.jobs.planning.lost_rows import LostRows
from headrace.jobs.results.stored_results import read_results
from headrace.jobs.shards.row_batch import RowBatch
from headrace.storage.errors import LeaseLost, LedgerUnavailable
from headrace.storage.ledger.leases import Leases
from headrace.storage.ledger.records import JobState, NewShard
from headrace.storage.output.address import open_folder
from headrace.storage.output.local_folder import LocalFolder
from headrace.storage.output.manifest import Manifest, complete_manifest, read_manifest, read_report, write_manifest
from headrace.storage.output.remote_folder import RemoteFolder
from headrace.storage.rows.spool import PlannedRow, write_shard

from ...storage.ledger.claiming import take_shard
from ..attempts import in_store
from ..shop import JOB, NO_TYPES, OVER, SHARD, Shop

RETRY = f"{JOB}/00001"
REFUSED = PlannedRow(3, "3", {}, None, "prompt is empty")
ROWS = [
    *(PlannedRow(row, str(row), {}, tokens, None) for row, tokens in enumerate([[1, 2], [3], [4, 5, 6]])),
    REFUSED,
    PlannedRow(4, "4", {}, [7, 8], None),
]


class Killed(BaseException):
    """Stands for the death of the process: nothing after it runs."""


@pytest.fixture(params=["disk", "store"])
def shop(shop: Shop, request: pytest.FixtureRequest) -> Shop:
    """Its job writes to a disk or to an object store."""
    return in_store(shop, request) if request.param == "store" else shop


def kill(monkeypatch: pytest.MonkeyPatch, method: str, part: str) -> None:
    """Die when a method of the output folder is called for a part whose name begins like this."""
    for kind in (LocalFolder, RemoteFolder):
        monkeypatch.setattr(kind, method, _mortal(getattr(kind, method), part))


def _mortal(original: Callable[..., None], part: str) -> Callable[..., None]:
    def die(folder: Any, name: str, *arguments: Any) -> None:
        if name.startswith(part):
            raise Killed
        original(folder, name, *arguments)

    return die


@contextmanager
def refused(error: str, *rows: int) -> Iterator[None]:
    """While the engine's answers to these rows are taken for refusals."""
    original = RowBatch.record

    def record(batch: RowBatch, outcomes: Sequence[Outcome]) -> list[Request]:
        def told(outcome: Outcome) -> Outcome:
            is_refused = int(outcome.request_id.split("/")[1]) in rows
            return Refusal(outcome.request_id, error) if is_refused else outcome

        return original(batch, list(map(told, outcomes)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RowBatch, "record", record)
        yield


def fail_rows(shop: Shop, *rows: int) -> None:
    """Run the job so that these rows become error rows and the others are answered, in two parts."""
    shop.create(ROWS, sampling={"max_tokens": 4})
    with refused("out of luck", *rows):
        shop.shard_runner().run(SHARD)
    assert shop.ledger.job(JOB).state is JobState.COMPLETED
    assert failed(shop) == sorted((*rows, REFUSED.row))


def failed(shop: Shop) -> list[int]:
    table = shop.table()
    return sorted(table.filter(table["error"].is_valid())["row"].to_pylist())


def rows_by_the_ledger(shop: Shop) -> list[int]:
    return read_results(shop.ledger, shop.ledger.job(JOB))["row"].to_pylist()


def test_only_failed_rows_are_tried_again_and_their_errors_go(shop):
    fail_rows(shop, 1, 4)
    started = shop.runner.num_sequences_started
    before = {row["row"]: row for row in shop.table().to_pylist()}
    assert retry_job(shop.ledger, JOB) == [RETRY]
    assert shop.ledger.job(JOB).state is JobState.RUNNING
    shop.shard_runner().run(RETRY)
    assert shop.runner.num_sequences_started == started + 2
    assert failed(shop) == [REFUSED.row]
    table = shop.table()
    assert table["row"].to_pylist() == [0, 1, 2, 3, 4]
    for row in table.to_pylist():
        if row["row"] in (1, 4):
            assert row["output"] == shop.text(row["row"])
        else:
            assert row == before[row["row"]]
    progress = shop.ledger.progress(JOB)
    assert (progress.state, progress.rows_done, progress.rows_failed) == (JobState.COMPLETED, 5, 1)
    assert progress.completion_tokens == sum(table["completion_tokens"].to_pylist())
    assert sorted(part.file_name for part in shop.ledger.parts(JOB)) == sorted(
        path.name for path in shop.output.glob("*.parquet")
    )
    assert not list(shop.output.glob(".part*"))


def test_rows_that_got_lost_and_are_made_again_elsewhere_are_not_tried_again(shop):
    fail_rows(shop, 0, 2)
    retry_job(shop.ledger, JOB)
    with refused("out of luck", 2):
        shop.shard_runner().run(RETRY)
    [others] = shop.ledger.parts(JOB, 0)
    open_folder(shop.ledger.job(JOB).output_dir).withdraw(others.file_name)
    lost = LostRows.of(shop.ledger, shop.ledger.job(JOB))
    assert lost is not None
    assert (lost.parts, lost.are_lost.nonzero()[0].tolist()) == ([others], [1, 3, 4])
    path = shop.folder / "jobs" / JOB / "again.parquet"
    write_shard(path, [ROWS[row] for row in (1, 3, 4)], NO_TYPES)
    assert shop.ledger.retry_job(JOB, [NewShard(2, 3, str(path))], lost.parts)
    assert shop.ledger.progress(JOB).rows_done == 2
    shop.shard_runner().run(f"{JOB}/00002")
    assert shop.table()["row"].to_pylist() == rows_by_the_ledger(shop) == [0, 1, 2, 3, 4]
    started = shop.runner.num_sequences_started
    assert retry_job(shop.ledger, JOB) == [f"{JOB}/00003"]
    shop.shard_runner().run(f"{JOB}/00003")
    assert shop.runner.num_sequences_started == started + 1
    assert shop.table()["row"].to_pylist() == rows_by_the_ledger(shop) == [0, 1, 2, 3, 4]
    assert failed(shop) == [REFUSED.row]


def test_errors_whose_files_get_lost_before_they_are_tried_again_do_not_hold_up_the_job(shop):
    fail_rows(shop, 0, 2)
    retry_job(shop.ledger, JOB)
    job, gone = shop.ledger.job(JOB), [part for part in shop.ledger.parts(JOB) if part.num_failed]
    write_manifest(folder := open_folder(job.output_dir), Manifest(JOB, "f"))
    for part in gone:
        folder.withdraw(part.file_name)
    shop.shard_runner().run(RETRY)
    assert shop.ledger.job(JOB).state is JobState.COMPLETED
    lost = LostRows.of(shop.ledger, job)
    assert lost is not None
    assert lost.parts == gone
    assert lost.are_lost[[0, 2]].all()


def test_what_fails_again_can_be_tried_again_until_nothing_is_left(shop):
    fail_rows(shop, 0, 1, 2, 4)
    retry_job(shop.ledger, JOB)
    with refused("out of luck", 2):
        shop.shard_runner().run(RETRY)
    assert failed(shop) == [2, REFUSED.row]
    assert retry_job(shop.ledger, JOB) == [f"{JOB}/00002"]
    shop.shard_runner().run(f"{JOB}/00002")
    assert failed(shop) == [REFUSED.row]
    assert shop.table()["row"].to_pylist() == [0, 1, 2, 3, 4]
    assert not (shop.folder / "jobs" / JOB).exists()
    with pytest.raises(NotRetriable, match="no failed row that could be tried again"):
        retry_job(shop.ledger, JOB)


@pytest.mark.parametrize(
    ("method", "part"),
    [
        ("write_part", "part-00001-02-001"),
        ("withdraw", "part-00000-01"),
        ("publish", "part-00001-02-001"),
        ("publish", "part-00001-02-000"),
    ],
    ids=["before the commit", "committed", "old part gone", "rest published"],
)
def test_wherever_a_retry_is_killed_each_row_is_there_once(shop, monkeypatch, method, part):
    fail_rows(shop, 1, 4)
    retry_job(shop.ledger, JOB)
    claim = take_shard(shop.ledger, RETRY, "doomed", -1)
    assert claim is not None
    with monkeypatch.context() as patch:
        kill(patch, method, part)
        with pytest.raises(Killed):
            shop.attempt(claim).run()
    assert rows_by_the_ledger(shop) == [0, 1, 2, 3, 4]
    seen = [row for path in shop.output.glob("*.parquet") for row in pq.read_table(path)["row"].to_pylist()]
    assert len(seen) == len(set(seen)) or shop.in_store
    shop.shard_runner().run(RETRY)
    assert failed(shop) == [REFUSED.row]
    assert shop.table()["row"].to_pylist() == rows_by_the_ledger(shop) == [0, 1, 2, 3, 4]
    assert not list(shop.output.glob(".part*"))
    assert shop.ledger.progress(JOB).rows_done == 5


def test_a_job_that_runs_or_was_cancelled_is_not_retried(shop):
    shop.create(ROWS)
    with pytest.raises(NotRetriable, match="is running"):
        retry_job(shop.ledger, JOB)
    shop.ledger.cancel_job(JOB)
    with pytest.raises(NotRetriable, match="is cancelled"):
        retry_job(shop.ledger, JOB)


def test_the_manifest_says_how_the_job_went(shop):
    shop.output.mkdir()
    write_manifest(LocalFolder(shop.output), Manifest(JOB, "f"))
    shop.output.rename(shop.folder / "kept")
    fail_rows(shop, 1)
    (shop.folder / "kept/_headrace.json").rename(shop.output / "_headrace.json")
    retry_job(shop.ledger, JOB)
    shop.shard_runner().run(RETRY)
    written = json.loads((shop.output / "_headrace.json").read_text())
    assert written["state"] == "completed"
    assert written["rows"] == {"total": 5, "done": 5, "failed": 1, "truncated": 2}
    assert written["tokens"]["completion"] == sum(shop.table()["completion_tokens"].to_pylist())
    assert written["model"] == str(shop.model)
    assert written["options"]["sampling"]["max_tokens"] == 4
    assert written["versions"].keys() == {"headrace", "torch"}
    assert written["created_at"] <= written["started_at"] <= written["finished_at"]
    assert read_manifest(LocalFolder(shop.output)) == Manifest(JOB, "f")


def test_while_it_is_retried_the_manifest_does_not_say_that_it_has_completed(shop):
    """By which another ledger's --overwrite would take the data set for one that nobody writes into."""
    fail_rows(shop, 1)
    folder, manifest = LocalFolder(shop.output), Manifest(JOB, "f")
    write_manifest(folder, manifest)
    complete_manifest(folder, manifest, lambda: {"state": "completed"})
    retry_job(shop.ledger, JOB)
    assert read_report(folder) == {"job_id": JOB, "fingerprint": "f"}
    shop.shard_runner().run(RETRY)
    assert (read_report(folder) or {})["state"] == "completed"


def test_rows_overtaken_by_the_deadline_expire_and_can_be_tried_again(shop):
    shop.create(ROWS, within_seconds=-1.0, sampling={"max_tokens": 4})
    shop.shard_runner().run(SHARD)
    assert shop.runner.num_sequences_started == 0
    errors: pa.ChunkedArray = shop.table()["error"]
    assert {error.split(":")[0] for error in errors.to_pylist()} == {"expired", "prompt is empty"}
    retry_job(shop.ledger, JOB)
    shop.shard_runner().run(RETRY)
    assert failed(shop) == [REFUSED.row]


def test_a_commit_whose_answer_is_lost_with_the_lease_stands(shop, monkeypatch):
    fail_rows(shop, 1, 4)
    retry_job(shop.ledger, JOB)
    claim = take_shard(shop.ledger, RETRY, "slow", OVER)
    assert claim is not None
    commit = Leases.commit_part

    def commit_without_answer(leases: Leases, *arguments: Any) -> None:
        commit(leases, *arguments)
        assert take_shard(shop.ledger, RETRY, "quick", OVER) is not None
        monkeypatch.setattr(Leases, "commit_part", commit)
        raise LedgerUnavailable("the connection was reset")

    monkeypatch.setattr(Leases, "commit_part", commit_without_answer)
    with pytest.raises(LeaseLost):
        shop.attempt(claim).run()
    assert rows_by_the_ledger(shop) == [0, 1, 2, 3, 4]
    shop.shard_runner().run(RETRY)
    assert failed(shop) == [REFUSED.row]
    assert shop.table()["row"].to_pylist() == rows_by_the_ledger(shop) == [0, 1, 2, 3, 4]
    assert not list(shop.output.glob(".part*"))


def test_a_retry_leaves_the_parts_of_another_job_alone(shop):
    fail_rows(shop, 1)
    retry_job(shop.ledger, JOB)
    other = shop.output / "part-00000-77-000.parquet"
    other.write_bytes(b"of the job that this folder has come to belong to")
    shop.shard_runner().run(RETRY)
    assert other.exists()


def test_failed_rows_of_several_parts_are_tried_again(shop, wait_until):
    shop.create(ROWS, sampling={"max_tokens": 4})
    shop.tools = replace(shop.tools, publish_seconds=0.0)
    shop.runner.close()
    with refused("no", 1, 4), ThreadPoolExecutor(1) as pool:
        run = pool.submit(shop.shard_runner().run, SHARD)
        for row in (0, 1, 2):
            committed = shop.num_committed()
            shop.permit_rows(row)
            wait_until(lambda before=committed: shop.num_committed() > before, f"row {row} is committed")
        shop.runner.open()
        run.result(60)
    assert len(shop.ledger.parts(JOB)) > 2
    retry_job(shop.ledger, JOB)
    shop.shard_runner().run(RETRY)
    assert failed(shop) == [REFUSED.row]
    assert shop.table()["row"].to_pylist() == rows_by_the_ledger(shop) == [0, 1, 2, 3, 4]
    assert shop.ledger.progress(JOB).rows_done == 5
