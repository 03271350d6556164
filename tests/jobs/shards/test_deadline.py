"""A job's deadline, when it comes while a shard runs."""

import time
from dataclasses import replace

import pytest

from headrace.jobs.shards.deadline import NOT_ANSWERED, Deadline
from headrace.storage.ledger.records import JobState

from ..attempts import ask
from ..conftest import wait_until
from ..shop import JOB, Shop

ROWS = ask((1, 2), (3, 5), (4, 5, 6), (7, 8))
LONG_ANSWERS = {"ignore_eos": True, "max_tokens": 12}


@pytest.mark.parametrize("trial", [False, True], ids=["all together", "in groups"])
def test_rows_without_an_answer_expire(shop: Shop, start, trial):
    shop.create(ROWS, within_seconds=60.0, sampling=LONG_ANSWERS)
    if trial:
        for _ in range(2):
            shop.claim(lease_seconds=-1.0)
            shop.ledger.messages.requeue_expired("q")
    shop.runner.close()
    attempt = shop.attempt()
    running = start(attempt.run)
    shop.permit_rows(0)
    wait_until(lambda: shop.num_committed() == 1, "the first row is committed")
    # The second is begun; nothing comes of it by itself. Time flies.
    attempt._deadline = Deadline(time.monotonic())
    try:
        assert running.result(60) is JobState.COMPLETED
    finally:
        shop.runner.open()
    table = shop.table()
    assert table["error"].to_pylist() == [None, *[NOT_ANSWERED] * 3]
    assert table["output"].to_pylist() == [shop.text(0), None, None, None]
    assert table["prompt_tokens"].to_pylist() == [2, 2, 3, 2]
    shop.assert_settled()
    wait_until(lambda: shop.host.stats.num_running == 0, "the engine is free again")


def test_who_is_in_time_notices_nothing(shop: Shop):
    shop.create(ROWS, within_seconds=60.0, sampling=LONG_ANSWERS)
    shop.attempt().run()
    shop.assert_complete()
    assert shop.ledger.job(JOB).deadline_at is not None


def test_a_deadline_counts_from_the_claim(shop: Shop):
    shop.create(ROWS, within_seconds=6000.0)
    claim, begin = shop.claim(), time.monotonic()
    deadline = Deadline.of(claim)
    # A slow machine takes its time to come here.
    assert deadline.at == pytest.approx(begin + 6000, abs=60)
    assert not deadline.has_passed
    assert deadline.not_after(begin + 5) == begin + 5
    assert deadline.not_after(begin + 50_000) == deadline.at
    assert Deadline.of(replace(claim, seconds_left=-1.0)).has_passed
    endless = Deadline.of(replace(claim, seconds_left=None))
    assert not endless.has_passed
    assert endless.not_after(begin + 500) == begin + 500
