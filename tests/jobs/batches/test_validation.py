"""A validation that is cut short leaves the batch to whoever comes next."""

import json
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.jobs.batches.keeper import BatchKeeper
from headrace.jobs.batches.validation import InvalidBatch, Validation
from headrace.storage.ledger.batch_jobs import batch_job_key
from headrace.storage.ledger.batch_records import BatchState
from headrace.storage.ledger.quotas import QuotaExceeded
from headrace.storage.ledger.records import NewPart

from ...storage.ledger.claiming import take_shard
from ..answers import WAIT_SECONDS
from .conftest import add_batch

NUM_LINES = 10


class Stop(Exception):
    pass


class StopAfter:
    """Stops whoever tells it of more than `rows` rows."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __call__(self) -> None:
        self.rows -= 1
        if self.rows < 0:
            raise Stop


@pytest.fixture
def batch(validation):
    return add_batch(validation, NUM_LINES)


# The lines are read once to check them and once to plan them.
@pytest.mark.parametrize("rows", [0, 5, NUM_LINES, NUM_LINES + 5])
def test_one_that_is_stopped_makes_no_job_and_no_verdict(validation, batch, rows):
    with pytest.raises(Stop):
        validation.run(batch, StopAfter(rows))
    assert validation.client.ledger.job_of_key(batch_job_key(batch.id), batch.tenant) is None


def test_one_that_was_done_already_is_found(validation, batch):
    job = validation.run(batch, lambda: None)
    assert (job.num_rows, job.tenant) == (NUM_LINES, batch.tenant)
    assert validation.run(batch, StopAfter(0)).id == job.id


def test_a_batch_takes_the_tokens_that_its_lines_ask_for(validation):
    """Each of the answers may have four tokens, whatever a job's rows have by default."""
    ledger = validation.client.ledger
    batch, other = add_batch(validation, NUM_LINES), add_batch(validation, NUM_LINES)
    job = validation.run(batch, lambda: None)
    assert job.answer_tokens == 4 * NUM_LINES
    needed = job.prompt_tokens + job.answer_tokens
    assert ledger.queued_tokens(batch.tenant) == needed
    ledger.tenants.set(other.tenant, queued_tokens=needed)
    assert validation.run(other, lambda: None).num_rows == NUM_LINES
    ledger.leases.finish_shard(claimed(ledger, job))
    assert ledger.queued_tokens(batch.tenant) == 0


def claimed(ledger, job):
    return take_shard(ledger, f"{job.id}/00000", "worker", 60)


def test_a_tenant_s_tokens_bound_a_batch(validation, batch):
    validation.client.ledger.tenants.set(batch.tenant, queued_tokens=1)
    try:
        with pytest.raises(InvalidBatch) as refused:
            validation.run(batch, lambda: None)
        assert refused.value.errors[0].code == "token_limit_exceeded"
    finally:
        validation.client.ledger.tenants.set(batch.tenant, queued_tokens=None)


def test_one_whose_tokens_only_fit_alone_waits_for_the_others(validation, batch):
    """And is not read again until they do."""
    ledger = validation.client.ledger
    other = add_batch(validation, NUM_LINES, tenant=batch.tenant)
    job = validation.run(batch, lambda: None)
    ledger.tenants.set(batch.tenant, queued_tokens=job.prompt_tokens + job.answer_tokens)
    for on_row in (lambda: None, StopAfter(0)):
        with pytest.raises(QuotaExceeded, match="beside the"):
            validation.run(other, on_row)
    ledger.leases.finish_shard(claimed(ledger, job))
    assert validation.run(other, lambda: None).num_rows == NUM_LINES


def test_one_that_waits_for_its_tenant_s_other_jobs_waits_no_longer_than_its_window(validation, wait_until):
    ledger = validation.client.ledger
    batch = add_batch(validation, NUM_LINES, within_seconds=0.2)
    ledger.tenants.set(batch.tenant, concurrent_jobs=0)
    with BatchKeeper(validation.client, validation.store, validation):
        wait_until(lambda: ledger.batches.get(batch.tenant, batch.id).state.has_ended, "the batch has ended")
    expired = ledger.batches.get(batch.tenant, batch.id)
    assert (expired.state, expired.lease_owner) == (BatchState.EXPIRED, None)
    assert expired.expired_at >= expired.expires_at
    assert expired.errors[0]["code"] == "batch_expired"


def test_answers_that_somebody_removed_do_not_hold_up_their_batch(validation, wait_until):
    ledger = validation.client.ledger
    batch = add_batch(validation, 2)
    with BatchKeeper(validation.client, validation.store, validation):
        wait_until(lambda: ledger.batches.get(batch.tenant, batch.id).job_id is not None, "it has a job")
    job_id = ledger.batches.get(batch.tenant, batch.id).job_id
    claim = take_shard(ledger, f"{job_id}/00000", "worker", 60)
    ledger.leases.commit_part(claim, NewPart("part-gone.parquet", 2))
    ledger.leases.finish_shard(claim)
    with BatchKeeper(validation.client, validation.store, validation):
        wait_until(lambda: ledger.batches.get(batch.tenant, batch.id).state.has_ended, "the batch has ended")
    ended = ledger.batches.get(batch.tenant, batch.id)
    assert (ended.state, ended.num_total, ended.num_failed) == (BatchState.COMPLETED, 2, 2)
    assert (ended.output_file_id, [error["code"] for error in ended.errors]) == (None, ["output_lost"])


def test_a_row_that_was_finished_before_the_cancellation_is_told_of_once(validation, wait_until):
    ledger = validation.client.ledger
    batch = add_batch(validation, 2)
    with BatchKeeper(validation.client, validation.store, validation):
        wait_until(lambda: ledger.batches.get(batch.tenant, batch.id).job_id is not None, "it has a job")
    job = ledger.job(ledger.batches.get(batch.tenant, batch.id).job_id)
    row = {"row": [0], "custom_id": ["row-0"], "error": ["attempt_failed: TypeError: asked for by the test"]}
    pq.write_table(pa.table(row), Path(job.output_dir, "part-one.parquet"))
    claim = take_shard(ledger, f"{job.id}/00000", "worker", 60)
    ledger.leases.commit_part(claim, NewPart("part-one.parquet", 1, 1))
    ledger.leases.release(claim)
    ledger.batches.cancel(batch.tenant, batch.id)
    with BatchKeeper(validation.client, validation.store, validation):
        wait_until(lambda: ledger.batches.get(batch.tenant, batch.id).state.has_ended, "the batch has ended")
    ended = ledger.batches.get(batch.tenant, batch.id)
    assert (ended.state, ended.num_total, ended.num_failed) == (BatchState.CANCELLED, 2, 2)
    file = validation.store.path(ledger.files.get(batch.tenant, ended.error_file_id))
    lines = sorted(map(json.loads, file.open()), key=lambda line: line["custom_id"])
    assert [line["custom_id"] for line in lines] == ["row-0", "row-1"]
    # No fault of the request's.
    assert lines[0]["response"]["status_code"] == 500


@dataclass(frozen=True)
class Endless(Validation):
    """Is never through with the first row."""

    begun: threading.Event = field(default_factory=threading.Event)

    def run(self, batch, on_row):
        def on_first_row():
            self.begun.set()
            while True:
                on_row()

        return super().run(batch, on_first_row)


def test_a_keeper_that_leaves_hands_its_batch_back(validation, wait_until):
    batches = validation.client.ledger.batches
    batch = add_batch(validation, NUM_LINES)
    endless = Endless(validation.client, validation.models, validation.store)
    with BatchKeeper(validation.client, validation.store, endless):
        assert endless.begun.wait(WAIT_SECONDS), "the batch is in hand"
    # A thread that stands still is not waited for.
    wait_until(lambda: batches.get(batch.tenant, batch.id).lease_owner is None, "it is handed back")
    left = batches.get(batch.tenant, batch.id)
    assert (left.state, left.lease_owner, left.errors) == (BatchState.VALIDATING, None, None)
    assert batches.cancel(batch.tenant, batch.id).state is BatchState.CANCELLING
