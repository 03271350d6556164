"""What is to be seen of all jobs together; what the API and the command line show of it is tested there."""

from headrace.storage.ledger.ledger import Ledger
from headrace.storage.ledger.overview import Ahead
from headrace.storage.ledger.records import NewJob, NewPart, NewShard
from headrace.storage.ledger.standing import read_progress

from .claiming import PART, CreateJob, claimed, take_shard


def test_nobody_knows_the_pace_of_a_queue_without_jobs(ledger: Ledger) -> None:
    assert ledger.overview.pace("headrace.bulk.none") is None


def create(ledger: Ledger, job_id: str, priority: int = 0) -> None:
    job = NewJob(job_id, "q", "model", f"/out/{job_id}", "f", num_rows=4, priority=priority)
    ledger.create_job(job, [NewShard(number, 2, "spool") for number in range(2)])


def test_the_job_ahead_is_the_one_being_done_or_else_the_next(ledger: Ledger) -> None:
    overview = ledger.overview
    create(ledger, "old")
    create(ledger, "new", priority=1)
    assert overview.ahead_of("new") is None
    assert overview.ahead_of("old") == Ahead("new", 4)
    claim = take_shard(ledger, "old/00000", "worker", 60.0)
    assert claim is not None
    # A worker is busy with it, whose turn it was when it came.
    assert (overview.ahead_of("old"), overview.ahead_of("new")) == (None, Ahead("old", 4))
    ledger.leases.commit_part(claim, NewPart("part-0", 1))
    assert overview.ahead_of("new") == Ahead("old", 3)
    ledger.pause_job("old")
    assert (overview.ahead_of("old"), overview.ahead_of("new")) == (None, None)
    assert overview.ahead_of("unknown") is None


def test_a_snapshot_is_of_one_moment(ledger: Ledger, create_job: CreateJob) -> None:
    create_job()
    claim = claimed(ledger, "job-1/00000")
    with ledger.database.snapshot() as connection:
        before = read_progress(connection, "job-1")
        ledger.leases.commit_part(claim, PART)
        assert read_progress(connection, "job-1") == before
    assert ledger.overview.standing("job-1").progress.rows_done == before.rows_done + 2
    # Nothing of it stays with the connection.
    with ledger.database.read() as connection:
        assert read_progress(connection, "job-1").rows_done == 2
