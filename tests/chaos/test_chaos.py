"""A job whose workers, Redis, database and disk are disturbed all the time, and that ends as if they had not been.

python -m pytest tests/chaos --chaos-seeds 20
"""

from contextlib import ExitStack
from random import Random

import pyarrow.dataset as ds

from headrace.engine.request import Request
from headrace.storage.records import AttemptOutcome, JobState

from ..engine.fakes import CONTEXT, fake_answer
from ..jobs.conftest import wait_until
from ..jobs.models import WORDS
from ..jobs.running import processes_of
from .site import SHARD_ROWS, Site, prompt_of

ROWS = 288
STEP_SECONDS = 0.015
SECONDS = 60.0


def test_whatever_happens_each_row_comes_out_once_and_right(seed, tmp_path):
    random = Random(seed)
    with ExitStack() as stack:
        site = Site(stack, tmp_path, ROWS, random, STEP_SECONDS)
        wait_until(lambda: site.job.progress().rows_done > 0, "the first part is committed", SECONDS)
        num_events = 0
        for event in site.mischief():
            if site.job.progress().state is not JobState.RUNNING:
                break
            event()
            num_events += 1
        assert site.job.wait(SECONDS, start_worker=False).state is JobState.COMPLETED
        assert num_events >= 6, "the job was over before much had happened to it"
        ledger = site.client.ledger
        shards = ledger.shards(site.job.id)
        parts = ledger.parts(site.job.id)
        attempts = [attempt for shard in shards for attempt in ledger.attempts(shard.id)]
    assert_each_row_once(site)
    assert sorted(path.name for path in site.output.glob("*part-*")) == sorted(part.file_name for part in parts)
    # What is generated again was in flight when an attempt ended without having done its shard.
    interrupted = sum(attempt.outcome is not AttemptOutcome.DONE for attempt in attempts)
    again = sum(site.num_begun.values()) - ROWS
    print(f"{num_events} events, {interrupted} of {len(attempts)} attempts interrupted, {again} rows begun again")
    assert 0 <= again <= interrupted * SHARD_ROWS
    wait_until(lambda: not processes_of(site.data_dir), "nothing is left")


def assert_each_row_once(site: Site) -> None:
    table = ds.dataset(sorted(map(str, site.output.glob("*.parquet")))).to_table().sort_by("row")
    assert table["row"].to_pylist() == list(range(ROWS))
    assert set(table["error"].to_pylist()) == {None}
    assert table["output"].to_pylist() == [undisturbed(site, row) for row in range(ROWS)]


def undisturbed(site: Site, row: int) -> str:
    params = site.job.spec.sampling.params(row, None)
    answer = fake_answer(Request("r", prompt_of(row), params), CONTEXT)
    return " ".join(WORDS[token] for token in answer if token != 0)
