"""A job whose workers, API, Redis, database and disk are disturbed all the time, and that ends as if they had not been.

Its ledger is in SQLite where the seed is even, in PostgreSQL where it is odd. All the while readers follow live
requests and rows of the job. A short job has half of the mischief: each of two neighbouring seeds the other half.

    python -m pytest tests/chaos --chaos-seeds 20 --chaos-rows 5000 -s
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from random import Random

import pyarrow.dataset as ds
import pytest

from headrace.engine.request import Request
from headrace.jobs.schemas import JobSpec
from headrace.storage.records import AttemptOutcome, JobState

from ..engine.fakes import CONTEXT, fake_answer
from ..jobs.conftest import wait_until
from ..jobs.models import WORDS
from ..jobs.running import processes_of
from ..postgres import new_database
from .databases import LedgerDatabase, PostgresDatabase, SqliteFile
from .readers import RowReader, Tally, live_readers, reading
from .site import MAX_TOKENS, Scale, Site, prompt_of

SECONDS = 90.0
LONG_ROWS = 2000
SHORT = partial(Scale, shard_rows=16, num_seqs=8, step_seconds=0.04)
LONG = partial(Scale, shard_rows=32, num_seqs=24, step_seconds=0.02)


@pytest.fixture
def database(seed: int, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[LedgerDatabase]:
    if seed % 2 == 0:
        yield SqliteFile(tmp_path / "ledger.db")
        return
    server = request.getfixturevalue("postgres")
    with new_database(server.url) as url:
        yield PostgresDatabase(server, url)


def test_whatever_happens_each_row_comes_out_once_and_right(seed, num_rows, database, tmp_path):
    is_long = num_rows >= LONG_ROWS
    scale = (LONG if is_long else SHORT)(num_rows)
    started = time.monotonic()
    with ExitStack() as stack:
        site = Site(stack, tmp_path, scale, Random(seed), database)
        if site.disk.reason:
            print(f"no disk is filled, only files are limited: {site.disk.reason}")
        wait_until(lambda: site.job.progress().rows_done > 0, "the first part is committed", SECONDS)
        tally = Tally()
        with reading(*readers(site, tally)):
            num_events = disturb(site, seed, is_long)
            assert site.job.wait(SECONDS, start_worker=False).state is JobState.COMPLETED
        assert num_events >= 4, "the job was over before much had happened to it"
        ledger = site.client.ledger
        assert [job.id for job in ledger.jobs()] == [site.job.id]
        shards, parts = ledger.shards(site.job.id), ledger.parts(site.job.id)
        attempts = [attempt for shard in shards for attempt in ledger.attempts(shard.id)]
        wait_until(lambda: not list(site.output.glob(".part*")), "no unpublished part is left")
        assert_each_row_once(site)
        assert sorted(path.name for path in site.output.glob("*part-*")) == sorted(part.file_name for part in parts)
    # What is generated again was in flight when an attempt ended without having done its shard.
    interrupted = sum(attempt.outcome is not AttemptOutcome.DONE for attempt in attempts)
    again = sum(site.num_begun.values()) - num_rows
    print(
        f"seed {seed}: {time.monotonic() - started:.1f} s, {num_events} events, {site.num_kills} kills, "
        f"{interrupted} of {len(attempts)} attempts interrupted, {again} rows begun again of at most "
        f"{interrupted * scale.shard_rows}; {tally}"
    )
    assert 0 <= again <= interrupted * scale.shard_rows
    assert tally.counts["answers"] > 0
    assert tally.counts["watched rows"] > 0
    wait_until(lambda: not processes_of(site.data_dir), "nothing is left")


def disturb(site: Site, seed: int, is_long: bool) -> int:
    """How much has happened before the job was over."""
    events, num_events = site.mischief(), 0
    if not is_long:
        mine = sorted({event.__name__ for event in events})[seed % 2 :: 2]
        events = [event for event in events if event.__name__ in mine]
    for event in events:
        if site.job.progress().state is not JobState.RUNNING:
            break
        event()
        num_events += 1
    return num_events


def readers(site: Site, tally: Tally):
    for number in range(3):
        yield lambda stop, number=number: live_readers(site.client, str(site.model), number, tally, stop)
    rows = RowReader(site.api.url, site.job.id, partial(undisturbed, site.job.spec), tally)
    for number in range(3):
        # Those that come last are likely to be begun under a reader's eyes.
        order = list(range(site.scale.num_rows))
        Random(number).shuffle(order)
        yield lambda stop, order=order: rows.watch(iter(order), stop)


def assert_each_row_once(site: Site) -> None:
    table = ds.dataset(sorted(map(str, site.output.glob("*.parquet")))).to_table().sort_by("row")
    num_rows = site.scale.num_rows
    assert table["row"].to_pylist() == list(range(num_rows))
    assert set(table["error"].to_pylist()) == {None}
    assert table["output"].to_pylist() == [undisturbed(site.job.spec, row) for row in range(num_rows)]


def undisturbed(spec: JobSpec, row: int) -> str:
    assert spec.sampling.temperature == 0.0
    return _undisturbed(row)


@cache
def _undisturbed(row: int) -> str:
    params = JobSpec.parse(model="m", sampling={"max_tokens": MAX_TOKENS}).sampling.params(row, None)
    answer = fake_answer(Request("r", prompt_of(row), params), CONTEXT)
    return " ".join(WORDS[token] for token in answer if token != 0)
