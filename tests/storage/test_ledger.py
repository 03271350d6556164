"""The ledger's rules, on both databases. A lease of -1 seconds has run out when it is given."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from headrace.storage import ledger as ledger_module
from headrace.storage.errors import JobEnded, LeaseLost, LedgerError, UnknownJob
from headrace.storage.ledger import Ledger
from headrace.storage.records import (
    AttemptOutcome,
    Claim,
    JobState,
    NewJob,
    NewPart,
    NewShard,
    Replacement,
    ShardState,
)

CreateJob = Callable[..., str]
PART = NewPart("part-00000-01-000.parquet", num_rows=2, num_failed=1, prompt_tokens=20, completion_tokens=4)


def claimed(ledger: Ledger, shard_id: str, owner: str = "worker-a", lease_seconds: float = 60) -> Claim:
    claim = ledger.claim(shard_id, owner, lease_seconds)
    assert claim is not None
    return claim


def outcomes(ledger: Ledger, shard_id: str) -> list[AttemptOutcome | None]:
    return [attempt.outcome for attempt in ledger.attempts(shard_id)]


def test_new_job_is_running_with_queued_shards(ledger: Ledger, create_job: CreateJob) -> None:
    create_job(num_shards=3)
    job = ledger.job("job-1")
    assert (job.state, job.num_rows, job.spec) == (JobState.RUNNING, 6, {"max_tokens": 8})
    assert job.num_planned_errors == 1
    assert job.started_at is None
    assert job.finished_at is None
    shards = ledger.shards("job-1")
    assert [shard.id for shard in shards] == ["job-1/00000", "job-1/00001", "job-1/00002"]
    assert {shard.state for shard in shards} == {ShardState.QUEUED}


def test_job_without_rows_is_completed(ledger: Ledger) -> None:
    ledger.create_job(NewJob("empty", "bulk", "tiny", "/out", "abc", num_rows=0), [])
    job = ledger.job("empty")
    assert job.state is JobState.COMPLETED
    assert job.finished_at is not None


def test_second_job_with_the_same_id_is_refused_whole(ledger: Ledger, create_job: CreateJob) -> None:
    create_job(num_shards=1)
    with pytest.raises(LedgerError, match="ledger "):
        create_job(num_shards=2)
    assert len(ledger.shards("job-1")) == 1


def test_unknown_job(ledger: Ledger) -> None:
    for call in (ledger.job, ledger.progress, ledger.cancel_job):
        with pytest.raises(UnknownJob, match="'nope'"):
            call("nope")


def test_jobs_newest_first(ledger: Ledger, create_job: CreateJob) -> None:
    for number in range(3):
        create_job(f"job-{number}")
    assert [job.id for job in ledger.jobs(limit=2)] == ["job-2", "job-1"]


def test_claim_takes_a_queued_shard_once(ledger: Ledger, create_job: CreateJob) -> None:
    create_job()
    claim = claimed(ledger, "job-1/00001")
    assert (claim.job_id, claim.shard_number, claim.attempt_number) == ("job-1", 1, 1)
    assert (claim.num_rows, claim.spool_path, claim.owner) == (2, "/spool/1.parquet", "worker-a")
    assert ledger.claim("job-1/00001", "worker-b", 60) is None
    assert ledger.job("job-1").started_at is not None


def test_claim_of_an_unknown_shard_is_none(ledger: Ledger) -> None:
    assert ledger.claim("nope/00000", "worker-a", 60) is None


def test_a_job_runs_through(ledger: Ledger, create_job: CreateJob) -> None:
    create_job()
    first, second = claimed(ledger, "job-1/00000"), claimed(ledger, "job-1/00001")
    ledger.commit_part(first, PART)
    ledger.commit_part(second, NewPart("part-00001-01-000.parquet", num_rows=1, cached_tokens=7))
    assert ledger.finish_shard(first) is JobState.RUNNING
    ledger.commit_part(second, NewPart("part-00001-01-001.parquet", num_rows=1))
    assert ledger.finish_shard(second) is JobState.COMPLETED
    progress = ledger.progress("job-1")
    assert progress.state is JobState.COMPLETED
    assert (progress.rows_total, progress.rows_done, progress.rows_failed) == (4, 4, 1)
    assert (progress.prompt_tokens, progress.cached_tokens, progress.completion_tokens) == (20, 7, 4)
    assert (progress.shards_total, progress.shards_done) == (2, 2)
    job = ledger.job("job-1")
    assert job.started_at is not None
    assert job.finished_at is not None
    assert job.created_at <= job.started_at <= job.finished_at
    assert outcomes(ledger, "job-1/00001") == [AttemptOutcome.DONE]


def test_progress_of_a_job_that_has_not_begun(ledger: Ledger, create_job: CreateJob) -> None:
    create_job()
    progress = ledger.progress("job-1")
    assert (progress.rows_total, progress.rows_done, progress.shards_total, progress.shards_done) == (
        4,
        0,
        2,
        0,
    )


def test_parts_of_a_job_and_of_a_shard(ledger: Ledger, create_job: CreateJob) -> None:
    create_job()
    first, second = claimed(ledger, "job-1/00000"), claimed(ledger, "job-1/00001")
    for claim, name in ((second, "b"), (first, "a"), (second, "c")):
        ledger.commit_part(claim, NewPart(name, num_rows=1))
    assert [part.file_name for part in ledger.parts("job-1")] == ["b", "a", "c"]
    assert [part.file_name for part in ledger.parts("job-1", shard_number=1)] == ["b", "c"]
    assert ledger.parts("job-1")[0].attempt_id == second.attempt_id


def test_commit_and_finish_can_be_repeated(ledger: Ledger, create_job: CreateJob) -> None:
    create_job(num_shards=1)
    claim = claimed(ledger, "job-1/00000")
    ledger.commit_part(claim, PART)
    ledger.commit_part(claim, PART)
    assert ledger.progress("job-1").rows_done == 2
    assert [ledger.finish_shard(claim) for _ in range(2)] == [JobState.COMPLETED] * 2
    with pytest.raises(LeaseLost):
        ledger.commit_part(claim, PART)


def test_a_file_name_belongs_to_one_attempt(ledger: Ledger, create_job: CreateJob) -> None:
    create_job()
    ledger.commit_part(claimed(ledger, "job-1/00000"), PART)
    with pytest.raises(LedgerError):
        ledger.commit_part(claimed(ledger, "job-1/00001"), PART)


def test_takeover_of_an_expired_lease(ledger: Ledger, create_job: CreateJob) -> None:
    create_job(num_shards=1)
    old = claimed(ledger, "job-1/00000", "worker-a", lease_seconds=-1)
    new = claimed(ledger, "job-1/00000", "worker-b")
    assert new.attempt_number == 2
    with pytest.raises(LeaseLost, match="attempt 1 at shard job-1/00000"):
        ledger.commit_part(old, PART)
    with pytest.raises(LeaseLost):
        ledger.finish_shard(old)
    ledger.release(old, "too late")
    assert ledger.shards("job-1")[0].lease_owner == "worker-b"
    assert ledger.parts("job-1") == []
    assert ledger.job("job-1").error is None
    ledger.commit_part(new, PART)
    ledger.finish_shard(new)
    assert outcomes(ledger, "job-1/00000") == [AttemptOutcome.RELEASED, AttemptOutcome.DONE]


def test_expired_lease_that_nobody_took_still_commits(ledger: Ledger, create_job: CreateJob) -> None:
    create_job(num_shards=1)
    claim = claimed(ledger, "job-1/00000", lease_seconds=-1)
    ledger.commit_part(claim, PART)
    assert ledger.renew("worker-a", [claim.attempt_id], 60) == {claim.attempt_id}
    assert ledger.claim("job-1/00000", "worker-b", 60) is None
    assert ledger.finish_shard(claim) is JobState.COMPLETED


def test_same_owner_with_an_older_attempt_has_lost_too(ledger: Ledger, create_job: CreateJob) -> None:
    create_job(num_shards=1)
    old = claimed(ledger, "job-1/00000", "worker-a", lease_seconds=-1)
    claimed(ledger, "job-1/00000", "worker-a")
    with pytest.raises(LeaseLost):
        ledger.commit_part(old, PART)


def test_renew_answers_which_leases_are_still_held(ledger: Ledger, create_job: CreateJob) -> None:
    create_job(num_shards=4)
    held = claimed(ledger, "job-1/00000", lease_seconds=-1)
    taken = claimed(ledger, "job-1/00001", lease_seconds=-1)
    finished = claimed(ledger, "job-1/00002")
    foreign = claimed(ledger, "job-1/00003", "worker-b")
    claimed(ledger, "job-1/00001", "worker-b")
    ledger.finish_shard(finished)
    ids = [claim.attempt_id for claim in (held, taken, finished, foreign)]
    assert ledger.renew("worker-a", ids, 60) == {held.attempt_id}
    assert ledger.requeue_expired("bulk") == []
    assert ledger.renew("worker-a", [], 60) == set()


def test_release_without_error_is_offered_at_once(ledger: Ledger, create_job: CreateJob) -> None:
    create_job(num_shards=1)
    ledger.release(claimed(ledger, "job-1/00000"))
    assert outcomes(ledger, "job-1/00000") == [AttemptOutcome.RELEASED]
    assert ledger.unclaimed("bulk", older_than_seconds=3600, limit=10) == ["job-1/00000"]
    assert claimed(ledger, "job-1/00000").attempt_number == 2


def test_release_with_an_error_waits_and_tells_the_job(ledger: Ledger, create_job: CreateJob) -> None:
    create_job(num_shards=1)
    ledger.release(claimed(ledger, "job-1/00000"), "disk full")
    assert ledger.job("job-1").error == ledger.progress("job-1").error == "disk full"
    assert ledger.attempts("job-1/00000")[0].error == "disk full"
    assert outcomes(ledger, "job-1/00000") == [AttemptOutcome.FAILED]
    assert ledger.unclaimed("bulk", older_than_seconds=3600, limit=10) == []
    ledger.finish_shard(claimed(ledger, "job-1/00000"))
    assert ledger.job("job-1").error is None


def test_released_shard_cannot_be_committed_to(ledger: Ledger, create_job: CreateJob) -> None:
    create_job(num_shards=1)
    claim = claimed(ledger, "job-1/00000")
    ledger.release(claim)
    with pytest.raises(LeaseLost):
        ledger.commit_part(claim, PART)
    assert ledger.renew("worker-a", [claim.attempt_id], 60) == set()


def test_dropped_part_no_longer_counts(ledger: Ledger, create_job: CreateJob) -> None:
    create_job(num_shards=1)
    claim = claimed(ledger, "job-1/00000")
    ledger.commit_part(claim, PART)
    (part,) = ledger.parts("job-1")
    ledger.drop_part(claim, part.id)
    assert ledger.progress("job-1").rows_done == 0


def test_drop_part_wants_the_lease_of_its_shard(ledger: Ledger, create_job: CreateJob) -> None:
    create_job()
    claim = claimed(ledger, "job-1/00000", lease_seconds=-1)
    ledger.commit_part(claim, PART)
    (part,) = ledger.parts("job-1")
    ledger.drop_part(claimed(ledger, "job-1/00001"), part.id)
    claimed(ledger, "job-1/00000", "worker-b")
    with pytest.raises(LeaseLost):
        ledger.drop_part(claim, part.id)
    assert ledger.parts("job-1") == [part]


def test_requeue_expired(ledger: Ledger, create_job: CreateJob) -> None:
    create_job(num_shards=3)
    create_job("other", queue="another")
    expired = claimed(ledger, "job-1/00000", lease_seconds=-1)
    claimed(ledger, "job-1/00001")
    claimed(ledger, "other/00000", lease_seconds=-1)
    assert ledger.requeue_expired("bulk") == ["job-1/00000"]
    assert ledger.requeue_expired("bulk") == []
    assert outcomes(ledger, "job-1/00000") == [AttemptOutcome.LOST]
    with pytest.raises(LeaseLost):
        ledger.commit_part(expired, PART)
    # Its message is being sent: it is not offered a second time before that has had its time.
    assert "job-1/00000" not in ledger.unclaimed("bulk", older_than_seconds=3600, limit=10)
    assert claimed(ledger, "job-1/00000").attempt_number == 2


def test_unclaimed_offers_each_shard_once_and_never_too_many(ledger: Ledger, create_job: CreateJob) -> None:
    create_job(num_shards=5)
    create_job("other", queue="another")
    claimed(ledger, "job-1/00000")
    assert ledger.unclaimed("bulk", older_than_seconds=3600, limit=10) == []
    ledger.release(claimed(ledger, "job-1/00003"))
    assert ledger.unclaimed("bulk", older_than_seconds=0, limit=2) == ["job-1/00001", "job-1/00003"]
    assert ledger.unclaimed("bulk", older_than_seconds=3600, limit=10) == []


def test_sweepers_at_the_same_time_offer_each_shard_once(ledger: Ledger, create_job: CreateJob) -> None:
    create_job(num_shards=40)
    ids = [shard.id for shard in ledger.shards("job-1")]
    start = threading.Barrier(4)

    def sweep(number: int) -> list[str]:
        start.wait(10)
        return ledger.requeue_expired("bulk") + ledger.unclaimed("bulk", older_than_seconds=60, limit=15)

    for shard_id in ids[:20]:
        claimed(ledger, shard_id, lease_seconds=-1)
    for shard_id in ids[20:]:
        ledger.release(claimed(ledger, shard_id))
    with ThreadPoolExecutor(4) as pool:
        offered = [shard_id for found in pool.map(sweep, range(4)) for shard_id in found]
    offered += ledger.unclaimed("bulk", older_than_seconds=60, limit=40)
    assert sorted(offered) == ids


def test_mark_enqueued(ledger: Ledger, create_job: CreateJob) -> None:
    create_job()
    for number in range(2):
        ledger.release(claimed(ledger, f"job-1/0000{number}"))
    ledger.mark_enqueued(["job-1/00000"])
    ledger.mark_enqueued([])
    assert ledger.unclaimed("bulk", older_than_seconds=3600, limit=10) == ["job-1/00001"]


def test_cancelled_job_stops_everywhere(ledger: Ledger, create_job: CreateJob) -> None:
    create_job(num_shards=3)
    running = claimed(ledger, "job-1/00000")
    claimed(ledger, "job-1/00001", lease_seconds=-1)
    assert ledger.cancel_job("job-1") is JobState.CANCELLED
    assert ledger.claim("job-1/00002", "worker-b", 60) is None
    assert ledger.renew("worker-a", [running.attempt_id], 60) == set()
    assert ledger.requeue_expired("bulk") == []
    assert ledger.unclaimed("bulk", older_than_seconds=0, limit=10) == []
    with pytest.raises(LeaseLost):
        ledger.commit_part(running, PART)
    with pytest.raises(LeaseLost):
        ledger.finish_shard(running)


def test_completed_job_stays_completed(ledger: Ledger, create_job: CreateJob) -> None:
    create_job(num_shards=1)
    ledger.finish_shard(claimed(ledger, "job-1/00000"))
    assert ledger.cancel_job("job-1") is JobState.COMPLETED
    assert ledger.claim("job-1/00000", "worker-b", 60) is None


def test_last_shards_finishing_together_complete_the_job(ledger: Ledger, create_job: CreateJob) -> None:
    for round_number in range(5):
        job_id = create_job(f"job-{round_number}", num_shards=4)
        claims = [claimed(ledger, f"{job_id}/0000{number}") for number in range(4)]
        start = threading.Barrier(4)

        def finish(claim: Claim, start: threading.Barrier = start) -> JobState:
            start.wait(10)
            return ledger.finish_shard(claim)

        with ThreadPoolExecutor(4) as pool:
            states = list(pool.map(finish, claims))
        assert JobState.COMPLETED in states
        assert ledger.job(job_id).state is JobState.COMPLETED


def test_a_paused_job_is_neither_claimed_nor_renewed_but_committed_to(ledger: Ledger, create_job: CreateJob) -> None:
    create_job(num_shards=3)
    running = claimed(ledger, "job-1/00000")
    claimed(ledger, "job-1/00001", lease_seconds=-1)
    for _ in range(2):
        ledger.pause_job("job-1")
        assert ledger.job("job-1").state is JobState.PAUSED
    assert ledger.claim("job-1/00002", "worker-b", 60) is None
    assert ledger.renew("worker-a", [running.attempt_id], 60) == set()
    assert ledger.requeue_expired("bulk") == []
    assert ledger.unclaimed("bulk", older_than_seconds=0, limit=10) == []
    ledger.commit_part(running, PART)
    ledger.release(running)
    assert ledger.progress("job-1").rows_done == 2


def test_a_resumed_job_names_the_shards_to_ring_for(ledger: Ledger, create_job: CreateJob) -> None:
    create_job(num_shards=3)
    held = claimed(ledger, "job-1/00001")
    ledger.pause_job("job-1")
    for _ in range(2):
        assert ledger.resume_job("job-1") == ["job-1/00000", "job-1/00002"]
        assert ledger.job("job-1").state is JobState.RUNNING
    assert ledger.renew("worker-a", [held.attempt_id], 60) == {held.attempt_id}
    assert ledger.unclaimed("bulk", older_than_seconds=60, limit=10) == []


def test_a_paused_job_completes_when_its_last_shard_was_already_answered(ledger: Ledger, create_job: CreateJob) -> None:
    create_job(num_shards=1)
    claim = claimed(ledger, "job-1/00000")
    ledger.pause_job("job-1")
    assert ledger.finish_shard(claim) is JobState.COMPLETED


def test_a_paused_job_can_be_cancelled(ledger: Ledger, create_job: CreateJob) -> None:
    create_job()
    ledger.pause_job("job-1")
    assert ledger.cancel_job("job-1") is JobState.CANCELLED


@pytest.mark.parametrize("verb", ["pause_job", "resume_job"])
def test_a_job_that_has_ended_is_not_paused_or_resumed(ledger: Ledger, create_job: CreateJob, verb: str) -> None:
    create_job("done", num_shards=1)
    ledger.finish_shard(claimed(ledger, "done/00000"))
    ledger.cancel_job(create_job("stopped"))
    for job_id, state in (("done", "completed"), ("stopped", "cancelled")):
        with pytest.raises(JobEnded, match=f"job {job_id} has ended: it is {state}"):
            getattr(ledger, verb)(job_id)
    with pytest.raises(UnknownJob):
        getattr(ledger, verb)("nope")


def test_a_completed_job_runs_again_with_more_shards(ledger: Ledger, create_job: CreateJob) -> None:
    create_job(num_shards=1)
    again = [NewShard(1, 1, "/spool/0.parquet", retry_of=0)]
    assert not ledger.retry_job("job-1", again)
    first = claimed(ledger, "job-1/00000")
    ledger.commit_part(first, PART)
    ledger.finish_shard(first)
    assert ledger.retry_job("job-1", again)
    assert not ledger.retry_job("job-1", again)
    job = ledger.job("job-1")
    assert (job.state, job.finished_at) == (JobState.RUNNING, None)
    claim = claimed(ledger, "job-1/00001")
    assert (claim.retry_of, claim.spool_path) == (0, "/spool/0.parquet")
    (old,) = ledger.parts("job-1")
    rest = NewPart("part-00001-02-001.parquet", num_rows=1, prompt_tokens=10)
    new = NewPart("part-00001-02-000.parquet", num_rows=1, prompt_tokens=9)
    for _ in range(2):
        ledger.commit_part(claim, new, [Replacement(old.id, rest)])
    progress = ledger.progress("job-1")
    assert (progress.rows_done, progress.rows_failed, progress.prompt_tokens) == (2, 0, 19)
    assert [part.file_name for part in ledger.parts("job-1", shard_number=0)] == [rest.file_name]
    assert [part.file_name for part in ledger.parts("job-1", shard_number=1)] == [new.file_name]
    assert ledger.finish_shard(claim) is JobState.COMPLETED


def test_a_part_of_which_nothing_stays_goes(ledger: Ledger, create_job: CreateJob) -> None:
    create_job()
    claim, other = claimed(ledger, "job-1/00000"), claimed(ledger, "job-1/00001")
    ledger.commit_part(claim, PART)
    (old,) = ledger.parts("job-1")
    ledger.commit_part(other, NewPart("new", num_rows=2), [Replacement(old.id, None)])
    assert [part.file_name for part in ledger.parts("job-1")] == ["new"]


def test_a_stale_attempt_replaces_nothing(ledger: Ledger, create_job: CreateJob) -> None:
    create_job()
    ledger.commit_part(claimed(ledger, "job-1/00000"), PART)
    (old,) = ledger.parts("job-1")
    stale = claimed(ledger, "job-1/00001", lease_seconds=-1)
    claimed(ledger, "job-1/00001", "worker-b")
    with pytest.raises(LeaseLost):
        ledger.commit_part(stale, NewPart("new", num_rows=1), [Replacement(old.id, None)])
    assert ledger.parts("job-1") == [old]


def test_a_claim_says_whether_the_deadline_has_passed(ledger: Ledger) -> None:
    for job_id, seconds in (("late", -1.0), ("early", 60.0), ("any", None)):
        job = NewJob(job_id, "bulk", "tiny", "/out", "abc", num_rows=1, within_seconds=seconds)
        ledger.create_job(job, [NewShard(0, 1, "/spool")])
    assert claimed(ledger, "late/00000").is_expired
    assert not claimed(ledger, "early/00000").is_expired
    assert not claimed(ledger, "any/00000").is_expired
    early = ledger.job("early")
    assert early.deadline_at == pytest.approx(early.created_at + 60, abs=1)
    assert ledger.job("any").deadline_at is None


def test_a_job_is_found_by_its_key_and_no_second_one_has_it(ledger: Ledger) -> None:
    def keyed(job_id: str) -> NewJob:
        return NewJob(job_id, "bulk", "tiny", "/out", "abc", num_rows=0, idempotency_key="nightly")

    assert ledger.job_of_key("nightly") is None
    ledger.create_job(keyed("one"), [])
    found = ledger.job_of_key("nightly")
    assert found is not None
    assert found.id == "one"
    with pytest.raises(LedgerError):
        ledger.create_job(keyed("two"), [])


def test_a_deleted_job_leaves_nothing_and_others_alone(ledger: Ledger, create_job: CreateJob) -> None:
    create_job("gone")
    create_job("kept")
    for job_id in ("gone", "kept"):
        ledger.commit_part(claimed(ledger, f"{job_id}/00000"), PART)
    ledger.delete_job("gone")
    with pytest.raises(UnknownJob):
        ledger.job("gone")
    assert (ledger.shards("gone"), ledger.parts("gone"), ledger.attempts("gone/00000")) == ([], [], [])
    assert ledger.progress("kept").rows_done == 2
    assert len(ledger.attempts("kept/00000")) == 1
    with pytest.raises(UnknownJob):
        ledger.delete_job("gone")


def test_the_parts_and_attempts_of_a_shard_and_its_retries(ledger: Ledger, create_job: CreateJob) -> None:
    create_job(num_shards=2)
    first, other = claimed(ledger, "job-1/00000"), claimed(ledger, "job-1/00001")
    for claim, name in ((first, "a"), (other, "b")):
        ledger.commit_part(claim, NewPart(name, num_rows=2, num_failed=1))
        ledger.finish_shard(claim)
    assert ledger.retry_job("job-1", [NewShard(2, 1, "/spool/0.parquet", retry_of=0)])
    again = claimed(ledger, "job-1/00002")
    ledger.commit_part(again, NewPart("c", num_rows=1))
    assert [part.file_name for part in ledger.retried_parts("job-1", 0)] == ["a", "c"]
    assert ledger.retrying_attempts("job-1", 0) == {first.attempt_id, again.attempt_id}
    assert ledger.retrying_attempts("job-1", 1) == {other.attempt_id}


def pause_seconds(ledger: Ledger) -> int:
    (shard,) = ledger.shards("job-1")
    assert shard.retry_at is not None
    assert shard.enqueued_at is not None
    return round(shard.retry_at - shard.enqueued_at)


def test_a_shard_that_fails_is_offered_again_after_ever_longer_pauses(ledger: Ledger, create_job: CreateJob) -> None:
    create_job(num_shards=1)
    pauses = []
    for _ in range(7):
        ledger.release(claimed(ledger, "job-1/00000"), "disk full")
        pauses.append(pause_seconds(ledger))
        assert ledger.unclaimed("bulk", older_than_seconds=0, limit=10) == []
        assert ledger.due_retries("bulk") == []
        assert ledger.progress("job-1").error == "disk full"
    assert pauses == [2, 4, 8, 16, 32, 60, 60]
    # An attempt that does not fail makes the next pause short again, and the job no longer waits.
    ledger.release(claimed(ledger, "job-1/00000"))
    assert ledger.progress("job-1").error is None
    ledger.release(claimed(ledger, "job-1/00000"), "disk full")
    assert pause_seconds(ledger) == 2


def test_a_pause_ends(ledger: Ledger, create_job: CreateJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "_FIRST_PAUSE_SECONDS", 0.0)
    create_job(num_shards=1)
    ledger.release(claimed(ledger, "job-1/00000"), "disk full")
    assert ledger.due_retries("another") == []
    assert ledger.due_retries("bulk") == ["job-1/00000"]
    assert ledger.due_retries("bulk") == []
    assert ledger.progress("job-1").error is None


def test_only_an_attempt_that_is_not_heard_of_again_is_lost(ledger: Ledger, create_job: CreateJob) -> None:
    create_job(num_shards=1)
    stopped = claimed(ledger, "job-1/00000", lease_seconds=-1)
    ledger.begin_trial(stopped, [4, 5])
    claimed(ledger, "job-1/00000", "worker-b")
    assert outcomes(ledger, "job-1/00000") == [AttemptOutcome.LOST, None]
    with pytest.raises(LeaseLost):
        ledger.begin_trial(stopped, [6])
    ledger.release(stopped)
    assert outcomes(ledger, "job-1/00000") == [AttemptOutcome.RELEASED, None]
    assert [attempt.trial_rows for attempt in ledger.attempts("job-1/00000")] == [[4, 5], None]
