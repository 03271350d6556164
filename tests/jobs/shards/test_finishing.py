"""What a completed job leaves to do where who completed it had no room or no time: whoever comes next does it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update

from headrace.jobs.broker.celery_app import shard_queue
from headrace.jobs.client.client import Client
from headrace.jobs.open_ledger import open_ledger
from headrace.jobs.planning.producer import new_job_id
from headrace.jobs.settings import Settings
from headrace.jobs.shards.finishing import finish_all_left, finish_job
from headrace.jobs.spec.precision import Precision
from headrace.storage.ledger import leases, tidying
from headrace.storage.ledger import ledger as ledger_module
from headrace.storage.ledger.batch_records import NewBatch
from headrace.storage.ledger.records import JobState, NewJob, NewShard
from headrace.storage.ledger.tables import jobs, shards
from headrace.storage.output.held_file import held_lock
from headrace.storage.output.local_folder import LocalFolder
from headrace.storage.output.manifest import Manifest, read_report, write_manifest
from headrace.storage.rows.planned_rows import PLANNED_ROWS
from headrace.storage.rows.spool import lost_lock_of, write_shard

from ...storage.ledger.claiming import claimed
from ..attempts import ROWS
from ..running import MODEL, Result, environment
from ..shop import JOB, NO_TYPES, QUEUE, SHARD, Shop


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is given time to finish, or waits long before trying again."""
    monkeypatch.setattr(leases, "TIDY_SECONDS", -1.0)
    monkeypatch.setattr(ledger_module, "TIDY_SECONDS", -1.0)
    monkeypatch.setattr(tidying, "_FIRST_PAUSE_SECONDS", 0.0)


@pytest.fixture
def shop(shop: Shop) -> Shop:
    shop.create(ROWS, sampling={"max_tokens": 4})
    write_manifest(LocalFolder(shop.output), Manifest(JOB, "f"))
    return shop


def said(shop: Shop) -> Any:
    """What the manifest says of how the job went, if it does."""
    return (read_report(LocalFolder(shop.output)) or {}).get("rows")


def fill_the_disk(shop: Shop) -> None:
    """The device that is always full, in the place of the next manifest's temporary file."""
    (shop.output / "._headrace.json.tmp").symlink_to("/dev/full")


def spools(shop: Shop) -> list[Path]:
    return list((shop.folder / "jobs").rglob("*.parquet"))


ALL_DONE = {"total": 5, "done": 5, "failed": 0, "truncated": 3}


def test_without_room_for_the_manifest_a_worker_tries_again(shop, wait_until, caplog):
    fill_the_disk(shop)
    shop.shard_runner().run(SHARD)
    assert f"job {JOB} is completed, but not all is tidy: cannot write {shop.output}/_headrace.json" in caplog.text
    assert shop.ledger.job(JOB).state is JobState.COMPLETED
    assert said(shop) is None

    def come_by() -> bool:
        finish_all_left(shop.ledger, "another queue")
        assert said(shop) is None
        finish_all_left(shop.ledger, QUEUE)
        return said(shop) == ALL_DONE

    wait_until(come_by, "the manifest says how the job went")
    assert shop.ledger.job(JOB).tidy_at is None


def by_command(*words: str) -> Callable[..., None]:
    def run(shop: Shop, served: Path, headrace: Callable[..., Result]) -> None:
        url = f"sqlite:///{shop.folder / 'ledger.db'}"
        assert headrace(served, *words, JOB, HEADRACE_DATABASE_URL=url).status == 0

    return run


def by_client(shop: Shop, served: Path, headrace: object) -> None:
    url = f"sqlite:///{shop.folder / 'ledger.db'}"
    with Client(Settings.from_environment(environment(served, HEADRACE_DATABASE_URL=url))) as client:
        assert client.job(JOB).results().num_rows == 5


@pytest.mark.parametrize(
    "read", [by_command("results"), by_command("show"), by_client], ids=["results", "show", "client"]
)
def test_what_a_killed_worker_left_is_done_by_who_reads_the_job(shop, served, headrace, read):
    """Killed between the last commit and all that follows it."""
    shop.attempt().run()
    assert (said(shop), len(spools(shop))) == (None, 1)
    read(shop, served, headrace)
    assert (said(shop), spools(shop)) == (ALL_DONE, [])
    assert shop.ledger.job(JOB).tidy_at is None


def test_workers_look_after_what_is_left(served, tmp_path, wait_until):
    """A job of which all is done but this, put among those of a running worker."""
    folder = LocalFolder(tmp_path / "out")
    folder.make()
    with open_ledger(Settings.from_environment(environment(served))) as ledger:
        job_id = new_job_id()
        write_manifest(folder, Manifest(job_id, "f"))
        job = NewJob(job_id, "a queue of its own", str(MODEL), str(folder), "f", num_rows=0)
        ledger.create_job(job, [NewShard(0, 0, str(tmp_path / "spool/0.parquet"))])
        ledger.leases.finish_shard(claimed(ledger, f"{job_id}/00000"))
        with ledger.database.write() as connection:
            connection.execute(
                update(jobs).where(jobs.c.id == job_id).values(queue=shard_queue(str(MODEL), Precision()))
            )
        wait_until(lambda: ledger.job(job_id).tidy_at is None, "the job is tidy")
        ledger.delete_job(job_id)
    assert (read_report(folder) or {})["state"] == "completed"


def test_who_reads_a_job_leaves_one_alone_that_is_being_finished(shop, served, headrace, monkeypatch):
    monkeypatch.setattr(leases, "TIDY_SECONDS", 3600.0)
    shop.attempt().run()
    by_command("results")(shop, served, headrace)
    assert said(shop) is None


def test_a_folder_that_is_gone_for_now_is_not_taken_for_tidy(shop, wait_until):
    shop.output.rename(shop.folder / "elsewhere")
    shop.output.mkdir()
    shop.shard_runner().run(SHARD)
    for part in shop.output.iterdir():
        part.rename(shop.folder / "elsewhere" / part.name)
    shop.output.rmdir()
    finish_all_left(shop.ledger, QUEUE)
    assert shop.ledger.job(JOB).tidy_at is not None
    (shop.folder / "elsewhere").rename(shop.output)

    def come_by() -> bool:
        finish_all_left(shop.ledger, QUEUE)
        return said(shop) == ALL_DONE

    wait_until(come_by, "the manifest says how the job went")


def test_a_folder_that_is_another_jobs_by_now_is_tidy(shop):
    LocalFolder(shop.output).remove(["_headrace.json"])
    write_manifest(LocalFolder(shop.output), Manifest("job_2", "f"))
    shop.shard_runner().run(SHARD)
    assert said(shop) is None
    assert shop.ledger.job(JOB).tidy_at is None


def test_the_spool_of_a_job_is_removed_whose_cancellation_was_killed(shop):
    shop.ledger.cancel_job(JOB)
    assert len(spools(shop)) == 1
    finish_all_left(shop.ledger, QUEUE)
    assert (spools(shop), said(shop)) == ([], None)
    assert shop.ledger.job(JOB).tidy_at is None


def test_no_folder_is_removed_but_the_jobs_own(shop):
    """Wherever the ledger says that its shards are."""
    other = shop.folder / "other/shard.parquet"
    other.parent.mkdir()
    spools(shop)[0].rename(other)
    with shop.ledger.database.write() as connection:
        connection.execute(update(shards).where(shards.c.job_id == JOB).values(spool_path=str(other)))
    shop.ledger.cancel_job(JOB)
    finish_all_left(shop.ledger, QUEUE)
    assert other.exists()
    assert shop.ledger.job(JOB).tidy_at is None


def test_where_the_rows_are_is_known_for_as_long_as_the_job(shop):
    planned = shop.folder / "jobs" / JOB / PLANNED_ROWS
    planned.write_bytes(b"")
    assert len(spools(shop)) > 1
    shop.shard_runner().run(SHARD)
    assert shop.ledger.job(JOB).state is JobState.COMPLETED
    assert spools(shop) == [planned]


def again(shop: Shop) -> Path:
    """A shard of rows that got lost, beside those that the job had."""
    path = shop.folder / "jobs" / JOB / "again.parquet"
    write_shard(path, ROWS[:1], NO_TYPES)
    return path


def test_what_is_spooled_meanwhile_of_rows_that_got_lost_stays(shop):
    shop.shard_runner().run(SHARD)
    with held_lock(lost_lock_of(shop.folder / "jobs" / JOB)):
        path = again(shop)
        finish_job(shop.ledger, shop.ledger.job(JOB))
        assert spools(shop) == [path]
    finish_job(shop.ledger, shop.ledger.job(JOB))
    assert spools(shop) == []


def test_who_is_slow_to_finish_a_job_leaves_alone_what_it_runs_again_for(shop):
    shop.shard_runner().run(SHARD)
    completed, path = shop.ledger.job(JOB), again(shop)
    assert shop.ledger.retry_job(JOB, [NewShard(1, 1, str(path))])
    finish_job(shop.ledger, completed)
    assert spools(shop) == [path]


def test_what_a_batch_is_to_read_of_a_cancelled_job_stays_until_it_has_ended(shop, wait_until):
    of_job = update(jobs).where(jobs.c.id == JOB)
    with shop.ledger.database.write() as connection:
        connection.execute(of_job.values(idempotency_key="batch/batch-1"))
    shop.ledger.batches.add(NewBatch("batch-1", "t", "/v1/completions", "file-in", "24h", 60.0))
    shop.ledger.cancel_job(JOB)
    finish_all_left(shop.ledger, QUEUE)
    assert (len(spools(shop)), shop.ledger.job(JOB).tidy_at is None) == (1, False)
    assert shop.ledger.batches.claim("batch-1", "keeper", 60.0) is not None
    assert shop.ledger.batches.fail("batch-1", "keeper", [])

    def come_by() -> bool:
        finish_all_left(shop.ledger, QUEUE)
        return not spools(shop)

    wait_until(come_by, "the spool is gone")
    assert shop.ledger.job(JOB).tidy_at is None
