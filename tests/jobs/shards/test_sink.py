"""A shard's rows in a SQL table: in the ledger's own database both are committed together."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text

from headrace.jobs.client.verbs import retry_job
from headrace.jobs.shards.attempt import ShardAttempt
from headrace.jobs.shards.part_schema import part_schema
from headrace.storage.errors import LeaseLost
from headrace.storage.ledger.records import JobState
from headrace.storage.output.sinks import SinkSpec, SqlSink

from ...storage.ledger.claiming import take_shard
from ..attempts import ROWS
from ..conftest import wait_until
from ..shop import JOB, OVER, Shop

RETRY = f"{JOB}/00001"


def sinking(shop: Shop, url: str) -> ShardAttempt:
    sink = SinkSpec.parse(url, "answers")
    SqlSink(sink, part_schema(shop.spec, ())).prepare()
    return ShardAttempt(shop.tools, shop.claim(), replace(shop.ledger.job(JOB), sink=sink.as_dict()))


def stored(url: str) -> list[dict[str, Any]]:
    engine = create_engine(url)
    with engine.connect() as connection:
        rows = [
            dict(row) for row in connection.execute(text("select row, output from answers order by row")).mappings()
        ]
    engine.dispose()
    return rows


@pytest.mark.parametrize("name", ["ledger.db", "answers.db"])
def test_it_gets_every_row_once(shop: Shop, tmp_path: Path, name: str) -> None:
    shop.create(ROWS)
    url = f"sqlite:///{tmp_path / name}"
    assert sinking(shop, url).run() is JobState.COMPLETED
    assert stored(url) == shop.table().select(["row", "output"]).to_pylist()


@pytest.mark.parametrize("name", ["ledger.db", "answers.db"])
def test_who_has_lost_the_lease_leaves_no_row(shop: Shop, tmp_path: Path, name: str) -> None:
    shop.create(ROWS)
    url = f"sqlite:///{tmp_path / name}"
    attempt = sinking(shop, url)
    shop.ledger.leases.release(attempt.claim)
    shop.claim()
    with pytest.raises(LeaseLost):
        attempt.run()
    assert stored(url) == []


def test_who_has_lost_the_lease_takes_no_row_of_its_successor_back(shop: Shop, tmp_path: Path) -> None:
    shop.create(ROWS)
    url = f"sqlite:///{tmp_path / 'answers.db'}"
    first = sinking(shop, url)
    shop.ledger.leases.release(first.claim)
    second = sinking(shop, url)
    assert second.run() is JobState.COMPLETED
    with pytest.raises(LeaseLost):
        first.run()
    assert stored(url) == shop.table().select(["row", "output"]).to_pylist()


def test_a_retry_that_has_lost_the_lease_leaves_the_rows_it_has_written_over(shop: Shop, tmp_path: Path) -> None:
    """What they were before is nowhere else: whoever tries them again writes over them."""
    url = f"sqlite:///{tmp_path / 'answers.db'}"
    shop.create(ROWS, within_seconds=-1.0)
    assert sinking(shop, url).run() is JobState.COMPLETED
    before = len(stored(url))
    retry_job(shop.ledger, JOB)
    claim = take_shard(shop.ledger, RETRY, "slow", OVER)
    assert claim is not None
    assert take_shard(shop.ledger, RETRY, "quick", OVER) is not None
    sink = SinkSpec.parse(url, "answers").as_dict()
    with pytest.raises(LeaseLost):
        ShardAttempt(shop.tools, claim, replace(shop.ledger.job(JOB), sink=sink)).run()
    assert len(stored(url)) == before == len(ROWS)


def test_a_table_that_is_gone_holds_up_the_commit(shop: Shop, start, tmp_path: Path, caplog) -> None:
    shop.create(ROWS)
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    attempt = sinking(shop, url)
    with shop.ledger.database.write() as connection:
        connection.execute(text("drop table answers"))
    running = start(attempt.run)
    wait_until(lambda: "trying again: sink sqlite:" in caplog.text, "it is named")
    assert shop.num_committed() == 0
    SqlSink(SinkSpec.parse(url, "answers"), part_schema(shop.spec, ())).prepare()
    assert running.result(60) is JobState.COMPLETED
    assert len(stored(url)) == len(ROWS)
