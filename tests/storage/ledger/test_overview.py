"""What is to be seen of all jobs together; what the API and the command line show of it is tested there."""

from sqlalchemy import insert, select, update

from headrace.storage.ledger.ledger import Ledger
from headrace.storage.ledger.overview import Ahead
from headrace.storage.ledger.records import NewJob, NewPart, NewShard
from headrace.storage.ledger.standing import read_progress
from headrace.storage.ledger.tables import attempts, jobs

from .claiming import PART, CreateJob, claimed, take_shard


def test_nobody_knows_the_pace_of_a_queue_without_jobs(ledger: Ledger) -> None:
    assert ledger.overview.pace("headrace.bulk.none") is None


def test_a_jobs_pace_is_of_the_time_that_workers_were_at_it(ledger: Ledger, create_job: CreateJob) -> None:
    create_job()
    # Two shards side by side for three seconds in all, and a day later one of them for a second more.
    for shard, part_tokens in (("job-1/00000", 30), ("job-1/00001", 10)):
        claim = claimed(ledger, shard)
        ledger.leases.commit_part(claim, NewPart(shard[-1], 2, prompt_tokens=part_tokens, completion_tokens=10))
        ledger.leases.finish_shard(claim)
    with ledger.database.write() as connection:
        first, second = connection.scalars(select(attempts.c.id).order_by(attempts.c.id))
        for attempt_id, started_at, ended_at in ((first, 100.0, 102.0), (second, 101.0, 103.0)):
            span = {"started_at": started_at, "ended_at": ended_at}
            connection.execute(update(attempts).where(attempts.c.id == attempt_id).values(span))
        shard_id = connection.scalars(select(attempts.c.shard_id).where(attempts.c.id == second)).one()
        retried = {"shard_id": shard_id, "number": 2, "owner": "w", "started_at": 90_000.0, "ended_at": 90_001.0}
        connection.execute(insert(attempts).values(retried))
        connection.execute(update(jobs).values(started_at=100.0, finished_at=90_001.0))
    pace = ledger.overview.pace(ledger.job("job-1").queue)
    assert pace is not None
    assert pace.tokens_per_second == 60 / 4


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
