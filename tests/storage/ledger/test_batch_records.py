"""Files and batches in the ledger: who may bring a batch further, and what each tenant sees."""

import pytest

from headrace.storage.errors import UnknownBatch, UnknownFile
from headrace.storage.ledger.batch_records import BatchRecords, BatchState, BatchTotals, DueBatch, NewBatch
from headrace.storage.ledger.file_records import NewFile
from headrace.storage.ledger.ledger import Ledger

LONG, OVER = 60.0, -1.0
TOTALS = BatchTotals(3, 2, 1, 30, 20, 10, 4)


@pytest.fixture
def batches(ledger: Ledger) -> BatchRecords:
    return ledger.batches


def new(batch_id: str, tenant: str = "t", within_seconds: float = LONG) -> NewBatch:
    return NewBatch(batch_id, tenant, "/v1/completions", "file-in", "24h", within_seconds)


def file(file_id: str) -> NewFile:
    return NewFile(file_id, "t", "batch_output", file_id, 1, "0" * 64, None)


def test_one_at_a_time_brings_a_batch_further(batches):
    batches.add(new("b"))
    assert batches.due() == [DueBatch("b", "t", BatchState.VALIDATING)]
    claimed = batches.claim("b", "one", LONG)
    assert (claimed.state, claimed.lease_owner) == (BatchState.VALIDATING, "one")
    assert batches.due() == []
    assert batches.claim("b", "two", LONG) is None
    assert not batches.begin("b", "two", "job", "m")
    batches.release("b", "two")
    assert batches.claim("b", "two", LONG) is None
    batches.release("b", "one")
    assert batches.claim("b", "two", LONG) is not None


def test_a_lease_that_ran_out_is_lost_once_somebody_takes_it(batches):
    batches.add(new("b"))
    assert batches.claim("b", "one", OVER) is not None
    assert batches.renew("one", ["b", "other"], OVER) == {"b": BatchState.VALIDATING}
    assert batches.claim("b", "two", LONG) is not None
    assert batches.renew("one", ["b"], LONG) == {}
    assert not batches.begin("b", "one", "job", "m")
    assert not batches.fail("b", "one", [])
    assert batches.begin("b", "two", "job", "m")
    assert (batches.get("t", "b").job_id, batches.get("t", "b").state) == ("job", BatchState.IN_PROGRESS)


def test_a_batch_ends_with_its_files_at_once_and_only_once(batches, ledger):
    batches.add(new("b"))
    batches.claim("b", "one", LONG)
    assert not batches.finish("b", "one", BatchState.COMPLETED, file("o"), None, TOTALS)
    assert batches.open_ids() == {"b"}
    assert batches.begin("b", "one", "job", "m")
    assert batches.begin_finalizing("b", "one")
    assert batches.open_ids() == {"b"}
    assert not batches.finish("b", "two", BatchState.COMPLETED, file("o"), None, TOTALS)
    with pytest.raises(UnknownFile):
        ledger.files.get("t", "o")
    assert batches.finish("b", "one", BatchState.COMPLETED, file("o"), file("e"), TOTALS)
    assert not batches.finish("b", "one", BatchState.COMPLETED, file("o"), file("e"), TOTALS)
    assert batches.open_ids() == set()
    done = batches.get("t", "b")
    assert (done.state, done.output_file_id, done.error_file_id) == (BatchState.COMPLETED, "o", "e")
    assert (done.num_total, done.num_completed, done.num_failed) == (3, 2, 1)
    assert (done.prompt_tokens, done.cached_tokens, done.completion_tokens) == (30, 20, 10)
    assert done.reasoning_tokens == 4
    assert done.created_at <= done.in_progress_at <= done.finalizing_at <= done.completed_at
    assert done.lease_owner is None
    assert batches.claim("b", "two", LONG) is None
    assert batches.cancel("t", "b") == done


def test_a_running_batch_is_due_when_its_job_or_its_time_is_over(batches):
    for name, seconds in (("late", OVER), ("jobless", LONG)):
        batches.add(new(name, within_seconds=seconds))
        batches.claim(name, "one", LONG)
        batches.begin(name, "one", "no such job", "m")
        assert batches.due() == []
        batches.release(name, "one")
        assert batches.due() == [DueBatch(name, "t", BatchState.IN_PROGRESS)]
        batches.claim(name, "one", LONG)


def test_cancelling_does_not_take_the_lease_but_the_next_step(batches):
    batches.add(new("b"))
    batches.claim("b", "one", LONG)
    cancelled = batches.cancel("t", "b")
    assert (cancelled.state, cancelled.ending) == (BatchState.CANCELLING, BatchState.CANCELLED)
    assert cancelled.cancelling_at is not None
    assert batches.renew("one", ["b"], LONG) == {"b": BatchState.CANCELLING}
    assert not batches.begin("b", "one", "job", "m")
    assert batches.cancel("t", "b").cancelling_at == cancelled.cancelling_at
    batches.release("b", "one")
    assert batches.due() == [DueBatch("b", "t", BatchState.CANCELLING)]


def test_a_batch_that_is_about_to_expire_can_not_be_cancelled_any_more(batches):
    batches.add(new("b"))
    batches.claim("b", "one", LONG)
    batches.begin("b", "one", "job", "m")
    assert batches.end_early("b", "one", BatchState.EXPIRED)
    assert batches.cancel("t", "b").state is BatchState.IN_PROGRESS


def test_each_tenant_has_its_own(batches):
    for name, tenant in (("b1", "t"), ("b2", "u"), ("b3", "t")):
        batches.add(new(name, tenant))
    assert [batch.id for batch in batches.page("t", 10)] == ["b3", "b1"]
    assert [batch.id for batch in batches.page("t", 10, after="b3")] == ["b1"]
    for call in (lambda: batches.get("t", "b2"), lambda: batches.cancel("t", "b2"), lambda: batches.page("t", 1, "b2")):
        with pytest.raises(UnknownBatch):
            call()
    assert batches.get("u", "b2").state is BatchState.VALIDATING
