"""A shard's way through an attempt: real ledger, real folder, and attempts that end early or late."""

import os
from dataclasses import replace

import pytest

from headrace.engine.checkpoints.hub import LocatedModel
from headrace.jobs.client.verbs import cancel_job
from headrace.jobs.errors import Stopped
from headrace.jobs.results.stored_results import read_results
from headrace.jobs.shards.attempt import ShardAttempt
from headrace.jobs.shards.weights import ModelWeights
from headrace.storage.errors import LeaseLost
from headrace.storage.ledger.records import AttemptOutcome, JobState, ShardState
from headrace.storage.rows.spool import PlannedRow

from ..answers import GatedRunner, hosted
from ..attempts import ROWS, ask, in_store, replace_job, stop_after
from ..conftest import wait_until
from ..models import write_model_folder
from ..shop import JOB, LONG, OVER, SHARD, Shop


@pytest.fixture(params=["disk", "store"])
def shop(shop: Shop, request: pytest.FixtureRequest) -> Shop:
    """Its job writes to a disk or to an object store."""
    return in_store(shop, request) if request.param == "store" else shop


def test_a_shard_is_answered_committed_and_done(shop):
    shop.create(ROWS, sampling={"max_tokens": 4})
    assert shop.attempt().run() is JobState.COMPLETED
    shop.assert_complete()
    assert [attempt.outcome for attempt in shop.ledger.attempts(SHARD)] == [AttemptOutcome.DONE]


def test_finished_rows_do_not_wait_for_the_others(shop, start):
    shop.create(ROWS, sampling={"max_tokens": 4})
    shop.runner.close()
    running = start(shop.attempt().run)
    shop.permit_rows(0, 1)
    wait_until(lambda: shop.num_committed() == 2, "two rows are committed")
    assert read_results(shop.ledger, shop.ledger.job(JOB))["row"].to_pylist() == [0, 1]
    # A store shows what is written.
    assert shop.in_store or shop.num_published() == 0
    shop.runner.open()
    assert running.result() is JobState.COMPLETED
    shop.assert_complete()
    assert len(shop.ledger.parts(JOB)) == 1


def test_a_stopped_attempt_is_taken_up_where_it_ended(shop, start):
    shop.create(ROWS, sampling={"max_tokens": 4})
    stop_after(shop, shop.attempt(), start, 0, 1)
    before = shop.files()
    started = shop.runner.num_sequences_started
    shop.attempt().run()
    shop.assert_complete()
    assert shop.files().items() >= before.items()
    # One more may have been under way when the first attempt was stopped.
    assert shop.runner.num_sequences_started - started in (3, 4)


def test_rows_finished_before_the_stop_are_committed(shop, start):
    shop.create(ROWS, sampling={"max_tokens": 4})
    attempt = shop.attempt(tools=replace(shop.tools, flush_seconds=LONG))
    shop.runner.close()
    running = start(attempt.run)
    shop.permit_rows(0, 1)
    wait_until(lambda: attempt._outcomes.empty() and shop.runner.num_sequences_started == 2, "two rows are answered")
    for _ in range(1 + len(shop.answer(0)) + len(shop.answer(1))):
        shop.runner.wait_until_reached()
    attempt.stop()
    with pytest.raises(Stopped):
        running.result()
    assert shop.table()["row"].to_pylist() == [0, 1]


@pytest.mark.parametrize("shop", ["disk"], indirect=True)
def test_what_a_killed_attempt_left_is_published_or_removed(shop, start):
    shop.create(ROWS, sampling={"max_tokens": 4})
    killed = shop.attempt(shop.claim(lease_seconds=OVER))
    stop_after(shop, killed, start, 0, 1)
    committed = shop.output / shop.ledger.parts(JOB)[0].file_name
    committed.rename(shop.output / f".{committed.name}.tmp")
    (shop.output / f".part-00000-{killed.claim.attempt_id:02d}-099.parquet.tmp").write_bytes(b"not committed")
    shop.attempt().run()
    shop.assert_complete()
    assert committed.exists()


def test_a_shard_of_refused_rows_needs_no_engine(shop):
    shop.runner.close()
    shop.create([PlannedRow(0, "x", {}, None, "prompt is empty"), PlannedRow(1, "y", {}, None, "line 2: broken")])
    shop.attempt().run()
    shop.assert_complete()
    assert shop.table()["custom_id"].to_pylist() == ["x", "y"]
    assert shop.table()["prompt_tokens"].to_pylist() == [0, 0]


def test_refused_rows_stand_beside_answered_ones(shop):
    shop.create([*ROWS, PlannedRow(5, "5", {}, None, "column 'text' is null")], sampling={"max_tokens": 4})
    shop.attempt().run()
    shop.assert_complete()


def test_what_the_engine_refuses_is_an_error_row(shop):
    shop.create(ask((1, 2), (99,), (3,)), sampling={"max_tokens": 4})
    shop.attempt().run()
    errors = shop.table()["error"].to_pylist()
    assert errors[0] is errors[2] is None
    assert "token id 99 is outside the vocabulary" in errors[1]
    shop.assert_settled()


def test_an_attempt_that_lost_its_lease_publishes_what_it_has_committed_and_no_more(shop, start):
    shop.create(ROWS, sampling={"max_tokens": 4})
    shop.runner.close()
    slow = shop.attempt(shop.claim(lease_seconds=OVER))
    running = start(slow.run)
    shop.permit_rows(0, 1)
    wait_until(lambda: shop.num_committed() == 2, "two rows are committed, as nobody has taken the shard yet")
    before = {part.file_name for part in shop.ledger.parts(JOB)}
    taken = shop.claim()
    shop.runner.open()
    with pytest.raises(LeaseLost):
        running.result()
    assert shop.files().keys() == before
    shop.attempt(taken).run()
    shop.assert_complete()


def test_the_loser_may_come_after_the_shard_is_done(shop, start):
    shop.create(ROWS, sampling={"max_tokens": 4})
    shop.runner.close()
    slow = shop.attempt(shop.claim(lease_seconds=OVER))
    running = start(slow.run)
    shop.runner.wait_until_reached()
    other_runner = GatedRunner()
    with hosted(other_runner) as (host, _):
        shop.attempt(tools=replace(shop.tools, host=host)).run()
    before = shop.files()
    shop.runner.open()
    with pytest.raises(LeaseLost):
        running.result()
    assert shop.files() == before
    shop.assert_complete()


@pytest.mark.parametrize("is_deleted", [False, True])
def test_a_job_that_ends_before_its_shard_is_begun_is_no_fault(shop, is_deleted):
    """The planned rows go with it."""
    shop.create(ROWS, sampling={"max_tokens": 4})
    attempt = shop.attempt()
    cancel_job(shop.ledger, JOB)
    if is_deleted:
        shop.ledger.delete_job(JOB)
    with pytest.raises(LeaseLost, match="its job has ended"):
        attempt.run()


def test_two_jobs_parts_in_one_folder_never_share_a_name(shop):
    """An overwritten job's worker may still be writing when the new job's begins."""
    shop.create(ROWS, sampling={"max_tokens": 4})
    old = shop.attempt()
    shop.ledger.cancel_job(JOB)
    job = replace_job(shop, "job_2")
    new = ShardAttempt(shop.tools, job, shop.ledger.job("job_2"))
    new.run()
    before = shop.files()
    with pytest.raises(LeaseLost):
        old.run()
    assert shop.files() == before
    names = {part.file_name for part in shop.ledger.parts("job_2")}
    assert names == before.keys()


def test_draining_commits_what_is_finished_and_hands_back_the_rest(shop, start):
    shop.create(ROWS, sampling={"max_tokens": 4})
    shop.runner.close()
    worker = shop.shard_runner()
    running = start(worker.run, SHARD)
    shop.permit_rows(0, 1)
    wait_until(lambda: shop.num_committed() == 2, "two rows are committed")
    worker.drain()
    running.result()
    assert shop.ledger.shards(JOB)[0].state is ShardState.QUEUED
    assert shop.ledger.attempts(SHARD)[0].outcome is AttemptOutcome.RELEASED
    worker.run(SHARD)
    assert len(shop.ledger.attempts(SHARD)) == 1, "a draining worker takes nothing"
    shop.runner.open()
    shop.shard_runner().run(SHARD)
    shop.assert_complete()


def test_a_shard_is_kept_while_the_weights_are_still_read(shop, start, tmp_path):
    """It was put back meanwhile, and taken again: with weights that took longer than a lease, time after time."""
    weights = write_model_folder(tmp_path / "weights")
    os.mkfifo(weights / "model.safetensors")
    shop.create(ROWS, sampling={"max_tokens": 4})
    worker = replace(shop.shard_runner(), weights=ModelWeights(LocatedModel(str(weights), weights)))
    running = start(worker.run, SHARD)
    try:
        # Among those whose leases are renewed.
        wait_until(lambda: len(worker.attempts) == 1, "the shard is taken")
    finally:
        (weights / "model.safetensors").write_bytes(b"the rest of them")
    running.result()
    shop.assert_complete()
    assert len(shop.ledger.attempts(SHARD)) == 1


def test_a_cancelled_jobs_attempt_ends_at_the_next_renewal(shop, start):
    shop.create(ROWS, sampling={"max_tokens": 4})
    shop.runner.close()
    worker = shop.shard_runner()
    running = start(worker.run, SHARD)
    shop.runner.wait_until_reached()
    worker.renew_leases()
    assert not running.done()
    shop.ledger.cancel_job(JOB)
    worker.renew_leases()
    running.result()
    assert shop.files() == {}


def test_a_shard_that_is_done_or_taken_is_left_alone(shop):
    shop.create(ROWS, sampling={"max_tokens": 4})
    taken = shop.claim()
    shop.shard_runner().run(SHARD)
    assert shop.files() == {}
    shop.attempt(taken).run()
    before = shop.files()
    shop.shard_runner().run(SHARD)
    assert shop.files() == before


def test_the_spool_goes_with_the_job(shop):
    shop.create(ROWS, sampling={"max_tokens": 4})
    shop.shard_runner().run(SHARD)
    assert not (shop.folder / "jobs" / JOB).exists()


def test_a_ledger_that_is_slow_for_such_leases_is_told_of(shop, caplog):
    replace(shop.shard_runner(), lease_seconds=60.0).renew_leases()
    assert not caplog.text
    # However fast it is.
    replace(shop.shard_runner(), lease_seconds=1e-9).renew_leases()
    assert "raise HEADRACE_LEASE_SECONDS, for all workers alike, to 1 or more" in caplog.text
