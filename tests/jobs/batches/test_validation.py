"""A validation that is cut short leaves the batch to whoever comes next."""

import json
import secrets
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.jobs.api.models import ServedModels
from headrace.jobs.batches.files import FileStore
from headrace.jobs.batches.keeper import BatchKeeper
from headrace.jobs.batches.validation import InvalidBatch, Validation, job_key
from headrace.jobs.client import Client
from headrace.jobs.settings import Settings
from headrace.storage.batch_records import BatchState, NewBatch
from headrace.storage.file_records import NewFile
from headrace.storage.records import NewPart

from ..api.batch_lines import CHAT, chat_line, jsonl
from ..running import MODEL, environment

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


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    """Over a ledger that no server looks after."""
    data_dir = tmp_path_factory.mktemp("unattended")
    with Client(Settings.from_environment(environment(data_dir))) as client:
        yield client


@pytest.fixture
def validation(client, tmp_path):
    store = FileStore(tmp_path / "files", client.ledger.files, 10_000_000)
    return Validation(client, ServedModels.of([str(MODEL)]), store)


def add_batch(validation, num_lines, within_seconds=3600):
    name, content = secrets.token_hex(8), jsonl(chat_line(f"row-{number}") for number in range(num_lines))
    tenant = f"tenant-{name}"
    with validation.store.incoming() as incoming:
        incoming.write(content)
        file = NewFile(f"file-{name}", tenant, "batch", "x", len(content), incoming.sha256, None)
        validation.store.add(incoming, file)
    new = NewBatch(f"batch_{name}", tenant, CHAT, file.id, "1h", within_seconds)
    return validation.client.ledger.batches.add(new)


@pytest.fixture
def batch(validation):
    return add_batch(validation, NUM_LINES)


# The lines are read once to check them and once to plan them.
@pytest.mark.parametrize("rows", [0, 5, NUM_LINES, NUM_LINES + 5])
def test_one_that_is_stopped_makes_no_job_and_no_verdict(validation, batch, rows):
    with pytest.raises(Stop):
        validation.run(batch, StopAfter(rows))
    assert validation.client.ledger.job_of_key(job_key(batch), batch.tenant) is None


def test_one_that_was_done_already_is_found(validation, batch):
    job = validation.run(batch, lambda: None)
    assert (job.num_rows, job.tenant) == (NUM_LINES, batch.tenant)
    assert validation.run(batch, StopAfter(0)).id == job.id


def test_a_tenant_s_tokens_bound_a_batch(validation, batch):
    validation.client.ledger.tenants.set(batch.tenant, queued_tokens=1)
    try:
        with pytest.raises(InvalidBatch) as refused:
            validation.run(batch, lambda: None)
        assert refused.value.errors[0].code == "token_limit_exceeded"
    finally:
        validation.client.ledger.tenants.set(batch.tenant, queued_tokens=None)


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
    claim = ledger.claim(f"{job_id}/00000", "worker", 60)
    ledger.commit_part(claim, NewPart("part-gone.parquet", 2))
    ledger.finish_shard(claim)
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
    row = {"row": [0], "custom_id": ["row-0"], "error": ["engine failed: asked for by the test"]}
    pq.write_table(pa.table(row), Path(job.output_dir, "part-one.parquet"))
    claim = ledger.claim(f"{job.id}/00000", "worker", 60)
    ledger.commit_part(claim, NewPart("part-one.parquet", 1, 1))
    ledger.release(claim)
    ledger.batches.cancel(batch.tenant, batch.id)
    with BatchKeeper(validation.client, validation.store, validation):
        wait_until(lambda: ledger.batches.get(batch.tenant, batch.id).state.has_ended, "the batch has ended")
    ended = ledger.batches.get(batch.tenant, batch.id)
    assert (ended.state, ended.num_total, ended.num_failed) == (BatchState.CANCELLED, 2, 2)
    file = validation.store.path(ledger.files.get(batch.tenant, ended.error_file_id))
    assert sorted(json.loads(line)["custom_id"] for line in file.open()) == ["row-0", "row-1"]


def test_a_keeper_that_leaves_hands_its_batch_back(validation, wait_until):
    batches = validation.client.ledger.batches
    batch = add_batch(validation, 20_000)
    with BatchKeeper(validation.client, validation.store, validation):
        wait_until(lambda: batches.get(batch.tenant, batch.id).lease_owner is not None, "the batch is in hand")
    left = batches.get(batch.tenant, batch.id)
    assert (left.state, left.lease_owner, left.errors) == (BatchState.VALIDATING, None, None)
    assert batches.cancel(batch.tenant, batch.id).state is BatchState.CANCELLING
