"""Who may work on a shard and commit to it, on both databases."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from headrace.storage.errors import LeaseLost, LedgerError
from headrace.storage.ledger import leases
from headrace.storage.ledger.ledger import Ledger
from headrace.storage.ledger.records import (
    AttemptOutcome,
    Claim,
    JobState,
    NewJob,
    NewPart,
    NewShard,
    Replacement,
)

from .claiming import PART, CreateJob, claimed, outcomes, take_shard


def test_claim_takes_a_queued_shard_once(ledger: Ledger, create_job: CreateJob) -> None:
    create_job()
    claim = claimed(ledger, "job-1/00001")
    assert (claim.job_id, claim.shard_number, claim.attempt_number) == ("job-1", 1, 1)
    assert (claim.num_rows, claim.spool_path, claim.owner) == (2, "/spool/1.parquet", "worker-a")
    assert take_shard(ledger, "job-1/00001", "worker-b", 60) is None
    assert ledger.job("job-1").started_at is not None


def test_claim_of_an_unknown_shard_is_none(ledger: Ledger) -> None:
    assert take_shard(ledger, "nope/00000", "worker-a", 60) is None


def test_commit_and_finish_can_be_repeated(ledger: Ledger, create_job: CreateJob) -> None:
    create_job(num_shards=1)
    claim = claimed(ledger, "job-1/00000")
    ledger.leases.commit_part(claim, PART)
    ledger.leases.commit_part(claim, PART)
    assert ledger.progress("job-1").rows_done == 2
    assert [ledger.leases.finish_shard(claim) for _ in range(2)] == [JobState.COMPLETED] * 2
    with pytest.raises(LeaseLost):
        ledger.leases.commit_part(claim, PART)


def test_a_cancellation_waits_for_the_commit_that_is_under_way(
    ledger: Ledger, create_job: CreateJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_job()
    claim = claimed(ledger, "job-1/00000")
    insert_part = leases._insert_part

    def parts_when_cancelled() -> list[str]:
        ledger.cancel_job("job-1")
        return ledger.part_names("job-1")

    with ThreadPoolExecutor(1) as pool:
        cancelling: list[Future[list[str]]] = []

        def insert_while_it_is_cancelled(*args: Any) -> None:
            insert_part(*args)
            cancelling.append(pool.submit(parts_when_cancelled))
            with suppress(TimeoutError):
                cancelling[0].result(timeout=0.5)

        monkeypatch.setattr(leases, "_insert_part", insert_while_it_is_cancelled)
        ledger.leases.commit_part(claim, PART)
        assert cancelling[0].result() == [PART.file_name]


def test_a_part_takes_the_place_of_those_that_are_merged_into_it(ledger: Ledger, create_job: CreateJob) -> None:
    create_job(num_shards=1)
    claim = claimed(ledger, "job-1/00000")
    small = [replace(PART, file_name=f"part-00000-01-{number:03d}.parquet") for number in range(3)]
    merged = NewPart("part-00000-01-003.parquet", num_rows=6, num_failed=3, prompt_tokens=60, completion_tokens=12)
    for part in small[:2]:
        ledger.leases.commit_part(claim, part)
    before = ledger.progress("job-1")
    for _ in range(2):
        ledger.leases.commit_part(claim, merged, merging=[part.file_name for part in small[:2]])
    assert ledger.part_names("job-1") == [merged.file_name]
    after = ledger.progress("job-1")
    assert (after.rows_done, after.prompt_tokens) == (before.rows_done + 2, before.prompt_tokens + 20)
    # Who looks for what has come since a part finds it by its id.
    assert ledger.parts("job-1")[0].id > 2


def test_a_file_name_belongs_to_one_attempt(ledger: Ledger, create_job: CreateJob) -> None:
    create_job()
    ledger.leases.commit_part(claimed(ledger, "job-1/00000"), PART)
    with pytest.raises(LedgerError):
        ledger.leases.commit_part(claimed(ledger, "job-1/00001"), PART)


def test_takeover_of_an_expired_lease(ledger: Ledger, create_job: CreateJob) -> None:
    create_job(num_shards=1)
    old = claimed(ledger, "job-1/00000", "worker-a", lease_seconds=-1)
    new = claimed(ledger, "job-1/00000", "worker-b")
    assert new.attempt_number == 2
    with pytest.raises(LeaseLost, match="attempt 1 at shard job-1/00000"):
        ledger.leases.commit_part(old, PART)
    with pytest.raises(LeaseLost):
        ledger.leases.finish_shard(old)
    ledger.leases.release(old, "too late")
    assert ledger.shards("job-1")[0].lease_owner == "worker-b"
    assert ledger.parts("job-1") == []
    assert ledger.job("job-1").error is None
    ledger.leases.commit_part(new, PART)
    ledger.leases.finish_shard(new)
    assert outcomes(ledger, "job-1/00000") == [AttemptOutcome.RELEASED, AttemptOutcome.DONE]


@pytest.mark.parametrize(("lease_seconds", "is_held"), [(60, True), (-1, False)])
def test_whether_an_attempt_may_still_hand_back_its_shard(
    ledger: Ledger, create_job: CreateJob, lease_seconds: float, is_held: bool
) -> None:
    create_job(num_shards=1)
    assert not ledger.leases.has_unexpired("job-1")
    claim = claimed(ledger, "job-1/00000", lease_seconds=lease_seconds)
    ledger.pause_job("job-1")
    assert ledger.leases.has_unexpired("job-1") is is_held
    assert not ledger.leases.has_unexpired("job-2")
    ledger.leases.release(claim)
    assert not ledger.leases.has_unexpired("job-1")


def test_expired_lease_that_nobody_took_still_commits(ledger: Ledger, create_job: CreateJob) -> None:
    create_job(num_shards=1)
    claim = claimed(ledger, "job-1/00000", lease_seconds=-1)
    ledger.leases.commit_part(claim, PART)
    assert ledger.leases.renew("worker-a", [claim.attempt_id], 60) == {claim.attempt_id}
    assert take_shard(ledger, "job-1/00000", "worker-b", 60) is None
    assert ledger.leases.finish_shard(claim) is JobState.COMPLETED


def test_same_owner_with_an_older_attempt_has_lost_too(ledger: Ledger, create_job: CreateJob) -> None:
    create_job(num_shards=1)
    old = claimed(ledger, "job-1/00000", "worker-a", lease_seconds=-1)
    claimed(ledger, "job-1/00000", "worker-a")
    with pytest.raises(LeaseLost):
        ledger.leases.commit_part(old, PART)


def test_renew_answers_which_leases_are_still_held(ledger: Ledger, create_job: CreateJob) -> None:
    create_job(num_shards=4)
    taken = claimed(ledger, "job-1/00001", lease_seconds=-1)
    claimed(ledger, "job-1/00001", "worker-b")
    held = claimed(ledger, "job-1/00000", lease_seconds=-1)
    finished = claimed(ledger, "job-1/00002")
    foreign = claimed(ledger, "job-1/00003", "worker-b")
    ledger.leases.finish_shard(finished)
    ids = [claim.attempt_id for claim in (held, taken, finished, foreign)]
    assert ledger.leases.renew("worker-a", ids, 60) == {held.attempt_id}
    assert ledger.messages.requeue_expired("bulk") == []
    assert ledger.leases.renew("worker-a", [], 60) == set()


def test_release_without_error_is_offered_at_once(ledger: Ledger, create_job: CreateJob) -> None:
    create_job(num_shards=1)
    ledger.leases.release(claimed(ledger, "job-1/00000"))
    assert outcomes(ledger, "job-1/00000") == [AttemptOutcome.RELEASED]
    assert ledger.messages.unclaimed("bulk", older_than_seconds=3600, limit=10) == ["job-1/00000"]
    assert claimed(ledger, "job-1/00000").attempt_number == 2


def test_release_with_an_error_waits_and_tells_the_job(ledger: Ledger, create_job: CreateJob) -> None:
    create_job(num_shards=1)
    ledger.leases.release(claimed(ledger, "job-1/00000"), "disk full")
    assert ledger.job("job-1").error == ledger.progress("job-1").error == "disk full"
    assert ledger.attempts("job-1/00000")[0].error == "disk full"
    assert outcomes(ledger, "job-1/00000") == [AttemptOutcome.FAILED]
    assert ledger.messages.unclaimed("bulk", older_than_seconds=3600, limit=10) == []
    ledger.leases.finish_shard(claimed(ledger, "job-1/00000"))
    assert ledger.job("job-1").error is None


def test_released_shard_cannot_be_committed_to(ledger: Ledger, create_job: CreateJob) -> None:
    create_job(num_shards=1)
    claim = claimed(ledger, "job-1/00000")
    ledger.leases.release(claim)
    with pytest.raises(LeaseLost):
        ledger.leases.commit_part(claim, PART)
    assert ledger.leases.renew("worker-a", [claim.attempt_id], 60) == set()


def test_dropped_part_no_longer_counts(ledger: Ledger, create_job: CreateJob) -> None:
    create_job(num_shards=1)
    claim = claimed(ledger, "job-1/00000")
    ledger.leases.commit_part(claim, PART)
    (part,) = ledger.parts("job-1")
    ledger.leases.drop_part(claim, part.id)
    assert ledger.progress("job-1").rows_done == 0


def test_drop_part_wants_the_lease_of_its_shard(ledger: Ledger, create_job: CreateJob) -> None:
    create_job()
    claim = claimed(ledger, "job-1/00000", lease_seconds=-1)
    ledger.leases.commit_part(claim, PART)
    (part,) = ledger.parts("job-1")
    ledger.leases.drop_part(claimed(ledger, "job-1/00001"), part.id)
    claimed(ledger, "job-1/00000", "worker-b")
    with pytest.raises(LeaseLost):
        ledger.leases.drop_part(claim, part.id)
    assert ledger.parts("job-1") == [part]


def test_last_shards_finishing_together_complete_the_job(ledger: Ledger, create_job: CreateJob) -> None:
    for round_number in range(5):
        job_id = create_job(f"job-{round_number}", num_shards=4)
        claims = [claimed(ledger, f"{job_id}/0000{number}") for number in range(4)]
        start = threading.Barrier(4)

        def finish(claim: Claim, start: threading.Barrier = start) -> JobState:
            start.wait(60)
            return ledger.leases.finish_shard(claim)

        with ThreadPoolExecutor(4) as pool:
            states = list(pool.map(finish, claims))
        assert JobState.COMPLETED in states
        assert ledger.job(job_id).state is JobState.COMPLETED


def test_a_part_of_which_nothing_stays_goes(ledger: Ledger, create_job: CreateJob) -> None:
    create_job()
    claim, other = claimed(ledger, "job-1/00000"), claimed(ledger, "job-1/00001")
    ledger.leases.commit_part(claim, PART)
    (old,) = ledger.parts("job-1")
    ledger.leases.commit_part(other, NewPart("new", num_rows=2), [Replacement(old, None)])
    assert [part.file_name for part in ledger.parts("job-1")] == ["new"]


def test_a_stale_attempt_replaces_nothing(ledger: Ledger, create_job: CreateJob) -> None:
    create_job()
    ledger.leases.commit_part(claimed(ledger, "job-1/00000"), PART)
    (old,) = ledger.parts("job-1")
    stale = claimed(ledger, "job-1/00001", lease_seconds=-1)
    claimed(ledger, "job-1/00001", "worker-b")
    with pytest.raises(LeaseLost):
        ledger.leases.commit_part(stale, NewPart("new", num_rows=1), [Replacement(old, None)])
    assert ledger.parts("job-1") == [old]


def test_a_claim_says_how_far_the_deadline_is(ledger: Ledger) -> None:
    for job_id, seconds in (("late", -1.0), ("early", 6000.0), ("any", None)):
        job = NewJob(job_id, "bulk", "tiny", "/out", "abc", num_rows=1, within_seconds=seconds)
        ledger.create_job(job, [NewShard(0, 1, "/spool")])
    assert claimed(ledger, "late/00000").is_expired
    in_time = claimed(ledger, "early/00000")
    assert not in_time.is_expired
    # A slow machine takes its time to come here.
    assert in_time.seconds_left == pytest.approx(6000, abs=60)
    endless = claimed(ledger, "any/00000")
    assert (endless.is_expired, endless.seconds_left) == (False, None)
    early = ledger.job("early")
    assert early.deadline_at == pytest.approx(early.created_at + 6000, abs=1)
    assert ledger.job("any").deadline_at is None


def test_only_an_attempt_that_is_not_heard_of_again_is_lost(ledger: Ledger, create_job: CreateJob) -> None:
    create_job(num_shards=1)
    stopped = claimed(ledger, "job-1/00000", lease_seconds=-1)
    ledger.leases.begin_trial(stopped, [4, 5])
    claimed(ledger, "job-1/00000", "worker-b")
    assert outcomes(ledger, "job-1/00000") == [AttemptOutcome.LOST, None]
    with pytest.raises(LeaseLost):
        ledger.leases.begin_trial(stopped, [6])
    ledger.leases.release(stopped)
    assert outcomes(ledger, "job-1/00000") == [AttemptOutcome.RELEASED, None]
    assert [attempt.trial_rows for attempt in ledger.attempts("job-1/00000")] == [[4, 5], None]
