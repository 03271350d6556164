"""What the tests of attempts share: a shard's rows, and attempts that end early."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import pytest

from headrace.jobs.errors import Stopped
from headrace.jobs.shards.attempt import ShardAttempt
from headrace.storage.ledger.records import Claim, NewJob, NewShard
from headrace.storage.rows.spool import PlannedRow

from ..storage.ledger.claiming import take_shard
from .conftest import wait_until
from .shop import COMPUTATION, JOB, LONG, Shop


def ask(*prompts: Sequence[int]) -> list[PlannedRow]:
    return [PlannedRow(row, str(row), {}, list(prompt), None) for row, prompt in enumerate(prompts)]


RECEIPT = {"weights": "w", "seed": None, "attempt": 1, **asdict(COMPUTATION)}
ROWS = ask((1, 2), (3,), (4, 5, 6), (7, 8), (9,))


def in_store(shop: Shop, request: pytest.FixtureRequest) -> Shop:
    """The shop with a job that writes to an object store, which this process knows for the test."""
    request.getfixturevalue("shelf")
    shop.in_store = True
    return shop


def stop_after(shop: Shop, attempt: ShardAttempt, start: Callable[..., Any], *rows: int) -> None:
    """Run an attempt until these rows are committed, then stop it and hand the shard back."""
    shop.runner.close()
    running = start(attempt.run)
    shop.permit_rows(*rows)
    wait_until(lambda: shop.num_committed() == len(rows), "the rows are committed")
    attempt.stop()
    with pytest.raises(Stopped):
        running.result()
    shop.ledger.leases.release(attempt.claim)
    shop.runner.open()


def replace_job(shop: Shop, job_id: str, **spec: Any) -> Claim:
    """Another job with the same rows and output folder, and its shard claimed."""
    old, shard = shop.ledger.job(JOB), shop.ledger.shards(JOB)[0]
    job = NewJob(job_id, "q", old.model, old.output_dir, "g", old.num_rows, spec or old.spec)
    shop.ledger.create_job(job, [NewShard(0, shard.num_rows, shard.spool_path)])
    claim = take_shard(shop.ledger, f"{job_id}/00000", "worker new", LONG)
    assert claim is not None
    return claim
