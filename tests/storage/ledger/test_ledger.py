"""The ledger's rules for jobs, on both databases."""

from pathlib import Path

import pytest

from headrace.storage.errors import JobEnded, LeaseLost, LedgerError, UnknownJob
from headrace.storage.ledger.ledger import Ledger
from headrace.storage.ledger.records import (
    AttemptOutcome,
    JobState,
    NewJob,
    NewPart,
    NewShard,
    Replacement,
    ShardState,
)

from .claiming import PART, CreateJob, claimed, outcomes, take_shard


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


def test_a_job_runs_through(ledger: Ledger, create_job: CreateJob) -> None:
    create_job()
    first, second = claimed(ledger, "job-1/00000"), claimed(ledger, "job-1/00001")
    ledger.leases.commit_part(first, PART)
    ledger.leases.commit_part(second, NewPart("part-00001-01-000.parquet", num_rows=1, cached_tokens=7))
    assert ledger.leases.finish_shard(first) is JobState.RUNNING
    ledger.leases.commit_part(second, NewPart("part-00001-01-001.parquet", num_rows=1))
    assert ledger.leases.finish_shard(second) is JobState.COMPLETED
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
        ledger.leases.commit_part(claim, NewPart(name, num_rows=1))
    assert [part.file_name for part in ledger.parts("job-1")] == ["b", "a", "c"]
    assert [part.file_name for part in ledger.parts("job-1", shard_number=1)] == ["b", "c"]
    assert ledger.parts("job-1")[0].attempt_id == second.attempt_id


def test_cancelled_job_stops_everywhere(ledger: Ledger, create_job: CreateJob) -> None:
    create_job(num_shards=3)
    running = claimed(ledger, "job-1/00000")
    claimed(ledger, "job-1/00001", lease_seconds=-1)
    assert ledger.cancel_job("job-1") is JobState.CANCELLED
    assert take_shard(ledger, "job-1/00002", "worker-b", 60) is None
    assert ledger.leases.renew("worker-a", [running.attempt_id], 60) == set()
    assert ledger.messages.requeue_expired("bulk") == []
    assert ledger.messages.unclaimed("bulk", older_than_seconds=0, limit=10) == []
    with pytest.raises(LeaseLost):
        ledger.leases.commit_part(running, PART)
    with pytest.raises(LeaseLost):
        ledger.leases.finish_shard(running)


def test_completed_job_stays_completed(ledger: Ledger, create_job: CreateJob) -> None:
    create_job(num_shards=1)
    ledger.leases.finish_shard(claimed(ledger, "job-1/00000"))
    assert ledger.cancel_job("job-1") is JobState.COMPLETED
    assert take_shard(ledger, "job-1/00000", "worker-b", 60) is None


def test_a_paused_job_is_neither_claimed_nor_renewed_but_committed_to(ledger: Ledger, create_job: CreateJob) -> None:
    create_job(num_shards=3)
    running = claimed(ledger, "job-1/00000")
    claimed(ledger, "job-1/00001", lease_seconds=-1)
    for _ in range(2):
        ledger.pause_job("job-1")
        assert ledger.job("job-1").state is JobState.PAUSED
    assert take_shard(ledger, "job-1/00002", "worker-b", 60) is None
    assert ledger.leases.renew("worker-a", [running.attempt_id], 60) == set()
    assert ledger.messages.requeue_expired("bulk") == []
    assert ledger.messages.unclaimed("bulk", older_than_seconds=0, limit=10) == []
    ledger.leases.commit_part(running, PART)
    ledger.leases.release(running)
    assert ledger.progress("job-1").rows_done == 2


def test_a_resumed_job_names_the_shards_to_ring_for(ledger: Ledger, create_job: CreateJob) -> None:
    create_job(num_shards=3)
    held = claimed(ledger, "job-1/00001")
    ledger.pause_job("job-1")
    for _ in range(2):
        assert ledger.resume_job("job-1") == ["job-1/00000", "job-1/00002"]
        assert ledger.job("job-1").state is JobState.RUNNING
    assert ledger.leases.renew("worker-a", [held.attempt_id], 60) == {held.attempt_id}
    assert ledger.messages.unclaimed("bulk", older_than_seconds=60, limit=10) == []


def test_a_paused_job_completes_when_its_last_shard_was_already_answered(ledger: Ledger, create_job: CreateJob) -> None:
    create_job(num_shards=1)
    claim = claimed(ledger, "job-1/00000")
    ledger.pause_job("job-1")
    assert ledger.leases.finish_shard(claim) is JobState.COMPLETED


def test_a_paused_job_can_be_cancelled(ledger: Ledger, create_job: CreateJob) -> None:
    create_job()
    ledger.pause_job("job-1")
    assert ledger.cancel_job("job-1") is JobState.CANCELLED


@pytest.mark.parametrize("verb", ["pause_job", "resume_job"])
def test_a_job_that_has_ended_is_not_paused_or_resumed(ledger: Ledger, create_job: CreateJob, verb: str) -> None:
    create_job("done", num_shards=1)
    ledger.leases.finish_shard(claimed(ledger, "done/00000"))
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
    ledger.leases.commit_part(first, PART)
    ledger.leases.finish_shard(first)
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
        ledger.leases.commit_part(claim, new, [Replacement(old, rest)])
    progress = ledger.progress("job-1")
    assert (progress.rows_done, progress.rows_failed, progress.prompt_tokens) == (2, 0, 19)
    assert [part.file_name for part in ledger.parts("job-1", shard_number=0)] == [rest.file_name]
    assert [part.file_name for part in ledger.parts("job-1", shard_number=1)] == [new.file_name]
    assert ledger.leases.finish_shard(claim) is JobState.COMPLETED


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


def test_jobs_by_when_they_ended(ledger: Ledger, create_job: CreateJob) -> None:
    for job_id in ("first", "second", "running"):
        create_job(job_id)
    moments = []
    for job_id in ("first", "second"):
        ledger.cancel_job(job_id)
        finished_at = ledger.job(job_id).finished_at
        assert finished_at is not None
        moments.append(finished_at)
    assert ledger.tidying.ended_before(moments[0]) == []
    assert ledger.tidying.ended_before(moments[1] + 1.0) == ["first", "second"]


def test_a_deleted_job_leaves_nothing_and_others_alone(ledger: Ledger, create_job: CreateJob) -> None:
    create_job("gone")
    create_job("kept")
    for job_id in ("gone", "kept"):
        ledger.leases.commit_part(claimed(ledger, f"{job_id}/00000"), PART)
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
        ledger.leases.commit_part(claim, NewPart(name, num_rows=2, num_failed=1))
        ledger.leases.finish_shard(claim)
    assert ledger.retry_job("job-1", [NewShard(2, 1, "/spool/0.parquet", retry_of=0)])
    again = claimed(ledger, "job-1/00002")
    ledger.leases.commit_part(again, NewPart("c", num_rows=1))
    assert [part.file_name for part in ledger.retried_parts("job-1", 0)] == ["a", "c"]
    assert ledger.retrying_attempts("job-1", 0) == {first.attempt_id, again.attempt_id}
    assert ledger.retrying_attempts("job-1", 1) == {other.attempt_id}
    assert ledger.retries("job-1") == {2: 0}


def test_where_a_jobs_shards_are_spooled(ledger: Ledger, create_job: CreateJob) -> None:
    create_job()
    assert ledger.spool_folder("job-1") == Path("/spool")
    assert ledger.spool_folder("nope") is None


def test_a_job_keeps_the_weights_that_were_noted_first_and_each_of_the_others_once(
    ledger: Ledger, create_job: CreateJob
) -> None:
    create_job()
    assert ledger.job("job-1").all_weights == []
    for weights in ("blake2b:1", "blake2b:2", "blake2b:1", "org/name@1_%", "blake2b:2", "org/name@1_%"):
        ledger.note_weights("job-1", weights)
    assert ledger.job("job-1").weights == "blake2b:1"
    assert ledger.job("job-1").all_weights == ["blake2b:1", "blake2b:2", "org/name@1_%"]


def test_progress_counts_kinds_of_answers(ledger: Ledger, create_job: CreateJob) -> None:
    create_job()
    parts = (NewPart("a", 2, num_from_cache=2), NewPart("b", 2, num_from_cache=1, num_truncated=2))
    for number, part in enumerate(parts):
        ledger.leases.commit_part(claimed(ledger, f"job-1/{number:05d}"), part)
    progress = ledger.progress("job-1")
    assert (progress.rows_from_cache, progress.rows_truncated) == (3, 2)
