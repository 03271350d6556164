"""Webhooks and the overview, on SQLite and PostgreSQL: what is due, who may send it, what waits."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from headrace.storage.ledger import webhooks
from headrace.storage.ledger.batch_records import NewBatch
from headrace.storage.ledger.ledger import Ledger
from headrace.storage.ledger.overview import Totals
from headrace.storage.ledger.records import JobState, NewJob, NewPart, NewShard, NewWebhook, WebhookState

from .claiming import take_shard


def create(ledger: Ledger, job_id: str, num_failed: int | None, within_seconds: float | None = None) -> None:
    """A job of one shard that has ended with as many failed rows of three; None: that has not."""
    webhook = NewWebhook("https://example.com/", "secret")
    job = NewJob(job_id, "q", "/m", "/o", "f", 3, {"model": "/m"}, within_seconds=within_seconds, webhook=webhook)
    ledger.create_job(job, [NewShard(0, 3, "/s")])
    if num_failed is not None:
        claim = take_shard(ledger, f"{job_id}/00000", "owner", 60)
        assert claim is not None
        ledger.leases.commit_part(claim, NewPart(f"{job_id}.parquet", 3, num_failed, 30, 10, 6))
        ledger.leases.finish_shard(claim)


def test_each_end_is_due_once(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    # None is due again, however slow the machine.
    monkeypatch.setattr(webhooks, "_FIRST_PAUSE_SECONDS", 3600.0)
    hooks = ledger.webhooks
    assert hooks.claim_due(10) == []
    create(ledger, "job_a", 0)
    create(ledger, "job_b", 3)
    create(ledger, "job_c", None)
    create(ledger, "job_d", 1, within_seconds=-5)
    due = {delivery.subject_id: delivery for delivery in hooks.claim_due(10)}
    assert {name: delivery.event_type for name, delivery in due.items()} == {
        "job_a": "job.completed",
        "job_b": "job.failed",
        "job_d": "job.expired",
    }
    assert due["job_a"].event_at == ledger.job("job_a").finished_at
    assert hooks.claim_due(10) == []
    hooks.delivered(due["job_a"])
    hooks.failed(due["job_b"], "status 500")
    hooks.failed(due["job_d"], "status 410", is_final=True)
    assert hooks.of_job("job_a") == [(WebhookState.DELIVERED, None)]
    assert hooks.of_job("job_b") == [(WebhookState.PENDING, "status 500")]
    assert hooks.of_job("job_c") == [(WebhookState.WAITING, None)]
    assert hooks.of_job("job_d") == [(WebhookState.FAILED, "status 410")]
    assert hooks.claim_due(10) == []


def test_a_job_and_a_batch_that_have_ended_are_told_of_once(ledger: Ledger) -> None:
    webhook = NewWebhook("https://example.com/", None)
    ledger.create_job(NewJob("job-1", "q", "m", "/o", "f", 1, webhook=webhook), [NewShard(0, 1, "/spool")])
    ledger.batches.add(NewBatch("batch-1", "t", "/v1/completions", "file-in", "24h", 60.0, webhook=webhook))
    hooks = ledger.webhooks
    assert hooks.claim_due(10) == []
    ledger.cancel_job("job-1")
    ledger.batches.claim("batch-1", "one", 60.0)
    ledger.batches.fail("batch-1", "one", [{"code": "empty_file", "message": "."}])
    due = hooks.claim_due(10)
    told = sorted((delivery.event_type, delivery.subject_id) for delivery in due)
    assert told == [("batch.failed", "batch-1"), ("job.cancelled", "job-1")]
    assert hooks.claim_due(10) == []
    for delivery in due:
        hooks.delivered(delivery)
    assert [str(state) for state, _ in (*hooks.of_job("job-1"), *hooks.of_batch("batch-1"))] == ["delivered"] * 2


def test_an_event_is_had_by_one(ledger: Ledger) -> None:
    for number in range(12):
        create(ledger, f"job_{number}", 0)
    hooks = ledger.webhooks
    with ThreadPoolExecutor(4) as pool:
        found = [
            delivery.subject_id for taken in pool.map(lambda _: hooks.claim_due(20), range(4)) for delivery in taken
        ]
    while len(found) < 12 and (more := hooks.claim_due(20)):
        found += [delivery.subject_id for delivery in more]
    assert sorted(found) == sorted(f"job_{number}" for number in range(12))


def test_the_overview(ledger: Ledger) -> None:
    overview = ledger.overview
    assert (overview.totals(), overview.waiting()) == (Totals(0, 0, 0, 0, 0), [])
    create(ledger, "job_a", 1)
    create(ledger, "job_b", None)
    assert overview.totals() == Totals(3, 1, 30, 10, 6)
    (waiting,) = overview.waiting()
    assert (waiting.queue, waiting.num_queued, waiting.num_running, waiting.queued_rows) == ("q", 1, 0, 3)
    # A clock of milliseconds may not have moved.
    assert waiting.oldest_seconds >= 0
    assert overview.jobs_by_state()[JobState.COMPLETED] == overview.jobs_by_state()[JobState.RUNNING] == 1
    newest, oldest = overview.page("default", 10)
    assert (newest.id, oldest.id) == ("job_b", "job_a")
    assert overview.page("default", 10, after=newest) == [oldest]
    assert overview.recent_rows_per_second("job_b") is None
    assert overview.recent_rows_per_second("job_a") is not None
