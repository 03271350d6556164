"""A job whose workers, API, Redis, database and disk are disturbed all the time, and that ends as if they had not been.

Its ledger is in SQLite where the seed is even, in PostgreSQL where it is odd. All the while readers follow live
requests and rows. Before each mischief a small job of long rows begins, so that there are always some which have been
generated in part: these go on from where their tokens were written down. A short job has half of the mischief: each of
two neighbouring seeds the other half.

    python -m pytest tests/chaos --chaos-seeds 20 --chaos-rows 5000 -s
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from itertools import count
from pathlib import Path
from random import Random

import pyarrow as pa
import pyarrow.dataset as ds
import pytest

from headrace.engine.request import Request
from headrace.jobs.spec.schemas import JobSpec
from headrace.storage.ledger.records import JobState

from ..engine.fakes import fake_answer
from ..jobs.conftest import wait_until
from ..jobs.running import processes_of
from ..postgres import new_database
from .account import Account
from .databases import LedgerDatabase, PostgresDatabase, SqliteFile
from .long_jobs import LongJob
from .mischief import Mischief
from .model import CONTEXT, prompt_of, text_of
from .readers import RowReader, Tally, live_readers, reading
from .site import LEASE_SECONDS, LONG_ROWS, MAX_TOKENS, Scale, Site

# Against what never comes alone: a machine may be slow, and busy with other tests.
SECONDS = 300.0
SHORT = Scale(
    num_rows=320,
    shard_rows=16,
    num_seqs=8,
    step_seconds=0.03,
    long_rows=2,
    long_tokens=64,
    database_seconds=2 * LEASE_SECONDS,
    hurries=True,
    kills_api_at_first=False,
)
LONG = Scale(
    num_rows=5000,
    shard_rows=32,
    num_seqs=24,
    step_seconds=0.02,
    long_rows=5,
    long_tokens=150,
    database_seconds=10.0,
)
# So many of the mischiefs have a long job begun before them.
SHORT_LONG_JOBS = 2
# A machine that is slow with one of them may be quick with the rows, so that the jobs are over before the others.
LEAST_MISCHIEF = 4
STREAMED_ROWS = 2


@pytest.fixture
def database(seed: int, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[LedgerDatabase]:
    if seed % 2 == 0:
        yield SqliteFile(tmp_path / "ledger.db")
        return
    server = request.getfixturevalue("postgres")
    with new_database(server.url) as url:
        yield PostgresDatabase(server, url)


@pytest.mark.timeout(3 * SECONDS)
def test_whatever_happens_each_row_comes_out_once_and_right(seed, num_rows, database, tmp_path):
    is_long = num_rows >= LONG_ROWS
    # Two short runs have all kinds of long jobs between them.
    scale = replace(LONG if is_long else SHORT, num_rows=num_rows, first_kind=0 if is_long else 2 * seed)
    started = time.monotonic()
    with ExitStack() as stack:
        site = Site(stack, tmp_path, scale, Random(seed), database)
        if site.disk.reason:
            print(f"no disk is filled, only files are limited: {site.disk.reason}")
        wait_until(lambda: site.job.progress().rows_done > 0, "the first part is committed", SECONDS)
        tally, mischief = Tally(), Mischief(site)
        with reading(*readers(site, tally)):
            disturb(site, mischief, seed, is_long)
            for job in site.jobs:
                assert job.wait(SECONDS, start_worker=False).state is JobState.COMPLETED
        ledger = site.client.ledger
        assert {job.id for job in ledger.jobs(100)} == {job.id for job in site.jobs}
        account = Account.of(ledger, [job.id for job in site.jobs])
        for job in site.jobs:
            folder, parts = Path(job.record.output_dir), ledger.parts(job.id)
            wait_until(partial(no_part_is_unpublished, folder), "no unpublished part is left", SECONDS)
            assert sorted(path.name for path in folder.glob("*part-*")) == sorted(part.file_name for part in parts)
        assert_each_row_once(site)
        for long_job in site.long_jobs:
            long_job.assert_undisturbed(rows_of(Path(long_job.job.record.output_dir)))
    again = site.num_begun.total() - len(site.num_begun)
    print(
        f"seed {seed}: {time.monotonic() - started:.1f} s, {mischief.done.total()} events ({mischief}), "
        f"{mischief.num_kills} kills; {account}; {again} rows begun again of at most {account.num_open_rows} "
        f"and {site.num_preempted} preempted, {site.num_resumed.total()} of them resumed, "
        f"{len(site.long_jobs)} long jobs; {tally}"
    )
    assert len(site.num_begun) == num_rows + len(site.long_jobs) * scale.long_rows
    assert 0 <= again <= account.num_open_rows + site.num_preempted
    assert tally.counts["answers"] > 0
    assert tally.counts["watched rows"] > 0
    wait_until(lambda: not processes_of(site.data_dir), "nothing is left", SECONDS)


def disturb(site: Site, mischief: Mischief, seed: int, is_long: bool) -> None:
    """Do one mischief after the other until the jobs are over, and so many in any case."""
    for event in mischief.kinds() if is_long else mischief.half_of_kinds(seed):
        is_running = site.is_running
        if not is_running and mischief.done.total() >= LEAST_MISCHIEF:
            break
        if is_long or not is_running or len(site.long_jobs) < SHORT_LONG_JOBS:
            site.submit_long_job()
        mischief.do(event)


def readers(site: Site, tally: Tally) -> Iterator[Callable[[threading.Event], None]]:
    for number in range(3):
        yield partial(live_readers, site.client, str(site.model), number, tally)
    yield partial(watch_short_rows, site, tally)
    for row in range(STREAMED_ROWS):
        yield partial(watch_long_rows, site, row, tally)


def no_part_is_unpublished(folder: Path) -> bool:
    return not list(folder.glob(".part*"))


def watch_short_rows(site: Site, tally: Tally, stop: threading.Event) -> None:
    reader = RowReader(site.api.url, site.job.id, partial(undisturbed, site.job.spec), tally)
    # Those that come last are likely to be begun under a reader's eyes.
    order = list(range(site.scale.num_rows))
    Random(0).shuffle(order)
    for row in order:
        if stop.is_set():
            return
        reader.watch(row)


def watch_long_rows(site: Site, row: int, tally: Tally, stop: threading.Event) -> None:
    """This row of each long job, from its beginning if it can be."""
    for number in count():
        while len(site.long_jobs) <= number:
            if stop.wait(0.01):
                return
        long_job = site.long_jobs[number]
        expected = partial(long_row, long_job)
        RowReader(site.api.url, long_job.job.id, expected, tally).watch(row)


def long_row(long_job: LongJob, row: int) -> str:
    return str(long_job.expected[row]["output"])


def rows_of(folder: Path) -> pa.Table:
    return ds.dataset(sorted(map(str, folder.glob("*.parquet")))).to_table().sort_by("row")


def assert_each_row_once(site: Site) -> None:
    table = rows_of(site.output)
    num_rows = site.scale.num_rows
    assert table["row"].to_pylist() == list(range(num_rows))
    assert set(table["error"].to_pylist()) == {None}
    assert table["output"].to_pylist() == [undisturbed(site.job.spec, row) for row in range(num_rows)]


def undisturbed(spec: JobSpec, row: int) -> str:
    assert spec.sampling.temperature == 0.0
    return _undisturbed(row)


@cache
def _undisturbed(row: int) -> str:
    params = JobSpec.parse(model="m", sampling={"max_tokens": MAX_TOKENS}).sampling.params(None)
    return text_of(fake_answer(Request("r", prompt_of(row), params), CONTEXT))
