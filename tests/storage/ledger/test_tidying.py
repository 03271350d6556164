"""Jobs that have ended and that somebody has still to tidy up, or to forget; on both databases."""

from dataclasses import replace

import pytest
from sqlalchemy import update

from headrace.storage.ledger import leases, tidying
from headrace.storage.ledger.ledger import Ledger
from headrace.storage.ledger.records import JobState, NewShard
from headrace.storage.ledger.tables import jobs

from .claiming import CreateJob, claimed


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has completed a job is not waited for, who takes it up then has all the time there is."""
    monkeypatch.setattr(leases, "TIDY_SECONDS", -1.0)
    monkeypatch.setattr(tidying, "TIDY_SECONDS", 3600.0)


def complete(ledger: Ledger, shard_id: str = "job-1/00000") -> None:
    assert ledger.leases.finish_shard(claimed(ledger, shard_id)) is JobState.COMPLETED


def due(ledger: Ledger) -> list[str]:
    return [job.id for job in ledger.tidying.take_due("bulk")]


def test_a_completed_job_is_taken_by_one_until_it_is_tidy(ledger: Ledger, create_job: CreateJob) -> None:
    create_job(num_shards=1)
    create_job("open", num_shards=1)
    create_job("other", num_shards=1, queue="another")
    assert due(ledger) == []
    for shard_id in ("job-1/00000", "other/00000"):
        complete(ledger, shard_id)
    assert due(ledger) == ["job-1"]
    assert due(ledger) == []
    assert ledger.tidying.take("job-1") is None
    assert ledger.tidying.take("nobody") is None
    (job,) = ledger.tidying.take_due("another")
    assert job == ledger.job("other")
    ledger.tidying.done(ledger.job("job-1"))
    assert ledger.job("job-1").tidy_at is None


def test_what_can_not_be_done_is_tried_again_later_each_time(
    ledger: Ledger, create_job: CreateJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_job(num_shards=1)
    complete(ledger)
    job = ledger.job("job-1")
    monkeypatch.setattr(tidying, "_FIRST_PAUSE_SECONDS", 3600.0)
    ledger.tidying.put_off(job)
    assert due(ledger) == []
    assert pause(ledger) >= 3600
    # As long after a try as that was after the end.
    with ledger.database.write() as connection:
        connection.execute(update(jobs).values(finished_at=jobs.c.finished_at - 10_000))
    ledger.tidying.put_off(ledger.job("job-1"))
    assert pause(ledger) >= 2 * 10_000 + 3600
    monkeypatch.setattr(tidying, "_FIRST_PAUSE_SECONDS", -20_000.0)
    ledger.tidying.put_off(ledger.job("job-1"))
    assert due(ledger) == ["job-1"]


def pause(ledger: Ledger) -> float:
    """From the end of the job to the next try."""
    job = ledger.job("job-1")
    assert job.tidy_at is not None
    assert job.finished_at is not None
    return job.tidy_at - job.finished_at


def test_a_job_that_is_tried_again_is_not_tidied_under_its_hands(ledger: Ledger, create_job: CreateJob) -> None:
    create_job(num_shards=1)
    complete(ledger)
    before = ledger.job("job-1")
    ledger.retry_job("job-1", [NewShard(1, 1, "/spool/0.parquet", retry_of=0)])
    assert due(ledger) == []
    ledger.tidying.put_off(before)
    assert ledger.job("job-1").tidy_at is None
    complete(ledger, "job-1/00001")
    # Somebody who was at it before does not know of the second end.
    assert before.finished_at is not None
    ledger.tidying.done(replace(before, finished_at=before.finished_at - 1))
    assert due(ledger) == ["job-1"]


def test_a_ledger_is_told_from_others_for_good(
    ledger: Ledger, database_url: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    again, other = Ledger(database_url), Ledger(f"sqlite:///{tmp_path_factory.mktemp('other') / 'ledger.db'}")
    other.migrate()
    again.migrate()
    assert again.identity == ledger.identity
    assert other.identity != ledger.identity
    for each in (again, other):
        each.close()


def test_a_job_is_either_given_up_or_tried_again(ledger: Ledger, create_job: CreateJob) -> None:
    again = [NewShard(1, 1, "/spool/0.parquet", retry_of=0)]
    for job_id in ("given-up", "retried"):
        create_job(job_id, num_shards=1)
        complete(ledger, f"{job_id}/00000")
    create_job("cancelled")
    ledger.cancel_job("cancelled")
    create_job("open")
    later = max(ledger.job(job_id).finished_at or 0.0 for job_id in ("given-up", "retried", "cancelled")) + 1.0
    assert ledger.retry_job("retried", again)
    assert not ledger.tidying.give_up("given-up", ended_before=later - 3600.0)
    all_ids = ("given-up", "cancelled", "retried", "open", "nobody")
    given_up = {job_id for job_id in all_ids if ledger.tidying.give_up(job_id, later)}
    assert given_up == {"given-up", "cancelled"}
    assert not ledger.retry_job("given-up", again)
    assert ledger.job("retried").state is JobState.RUNNING
    assert set(ledger.tidying.ended_before(later)) == given_up
