"""Shards that are offered again: after a lost lease, a lost message or a failure; on both databases."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from headrace.storage.errors import LeaseLost
from headrace.storage.ledger import leases
from headrace.storage.ledger.ledger import Ledger
from headrace.storage.ledger.records import (
    AttemptOutcome,
)

from .claiming import PART, CreateJob, claimed, outcomes


def test_requeue_expired(ledger: Ledger, create_job: CreateJob) -> None:
    create_job(num_shards=3)
    create_job("other", queue="another")
    expired = claimed(ledger, "job-1/00000", lease_seconds=-1)
    claimed(ledger, "job-1/00001")
    claimed(ledger, "other/00000", lease_seconds=-1)
    assert ledger.messages.requeue_expired("bulk") == ["job-1/00000"]
    assert ledger.messages.requeue_expired("bulk") == []
    assert outcomes(ledger, "job-1/00000") == [AttemptOutcome.LOST]
    with pytest.raises(LeaseLost):
        ledger.leases.commit_part(expired, PART)
    # Its message is being sent: it is not offered a second time before that has had its time.
    assert "job-1/00000" not in ledger.messages.unclaimed("bulk", older_than_seconds=3600, limit=10)
    assert claimed(ledger, "job-1/00000").attempt_number == 2


def test_unclaimed_offers_each_shard_once_and_never_too_many(ledger: Ledger, create_job: CreateJob) -> None:
    create_job(num_shards=5)
    create_job("other", queue="another")
    claimed(ledger, "job-1/00000")
    assert ledger.messages.unclaimed("bulk", older_than_seconds=3600, limit=10) == []
    ledger.leases.release(claimed(ledger, "job-1/00003"))
    assert ledger.messages.unclaimed("bulk", older_than_seconds=0, limit=2) == ["job-1/00001", "job-1/00003"]
    assert ledger.messages.unclaimed("bulk", older_than_seconds=3600, limit=10) == []


def test_sweepers_at_the_same_time_offer_each_shard_once(ledger: Ledger, create_job: CreateJob) -> None:
    create_job(num_shards=40)
    ids = [shard.id for shard in ledger.shards("job-1")]
    start = threading.Barrier(4)

    def sweep(number: int) -> list[str]:
        start.wait(60)
        return ledger.messages.requeue_expired("bulk") + ledger.messages.unclaimed(
            "bulk", older_than_seconds=60, limit=15
        )

    for shard_id in ids[:20]:
        claimed(ledger, shard_id, lease_seconds=-1)
    for shard_id in ids[20:]:
        ledger.leases.release(claimed(ledger, shard_id))
    with ThreadPoolExecutor(4) as pool:
        offered = [shard_id for found in pool.map(sweep, range(4)) for shard_id in found]
    offered += ledger.messages.unclaimed("bulk", older_than_seconds=60, limit=40)
    assert sorted(offered) == ids


def test_mark_enqueued(ledger: Ledger, create_job: CreateJob) -> None:
    create_job()
    for number in range(2):
        ledger.leases.release(claimed(ledger, f"job-1/0000{number}"))
    ledger.messages.mark_enqueued(["job-1/00000"])
    ledger.messages.mark_enqueued([])
    assert ledger.messages.unclaimed("bulk", older_than_seconds=3600, limit=10) == ["job-1/00001"]


def pause_seconds(ledger: Ledger) -> int:
    (shard,) = ledger.shards("job-1")
    assert shard.retry_at is not None
    assert shard.enqueued_at is not None
    return round(shard.retry_at - shard.enqueued_at)


def test_a_shard_that_fails_is_offered_again_after_ever_longer_pauses(ledger: Ledger, create_job: CreateJob) -> None:
    create_job(num_shards=1)
    pauses = []
    for _ in range(7):
        ledger.leases.release(claimed(ledger, "job-1/00000"), "disk full")
        pauses.append(pause_seconds(ledger))
        assert ledger.messages.unclaimed("bulk", older_than_seconds=0, limit=10) == []
        assert ledger.progress("job-1").error == "disk full"
    assert pauses == [2, 4, 8, 16, 32, 60, 60]
    # Only of the last pause is it sure that it is not over by now.
    assert ledger.messages.due_retries("bulk") == []
    # An attempt that does not fail makes the next pause short again, and the job no longer waits.
    ledger.leases.release(claimed(ledger, "job-1/00000"))
    assert ledger.progress("job-1").error is None
    ledger.leases.release(claimed(ledger, "job-1/00000"), "disk full")
    assert pause_seconds(ledger) == 2


def test_a_pause_ends(ledger: Ledger, create_job: CreateJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "_FIRST_PAUSE_SECONDS", 0.0)
    create_job(num_shards=1)
    ledger.leases.release(claimed(ledger, "job-1/00000"), "disk full")
    assert ledger.messages.due_retries("another") == []
    assert ledger.messages.due_retries("bulk") == ["job-1/00000"]
    assert ledger.messages.due_retries("bulk") == []
    # Until somebody takes it: it may be that nobody can.
    assert ledger.progress("job-1").error == "disk full"
    claimed(ledger, "job-1/00000")
    assert ledger.progress("job-1").error is None
