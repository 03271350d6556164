"""Workers that share a job each walk through neighbouring shards, and so compute few prefixes twice."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from headrace.engine.config import EngineConfig
from headrace.jobs.hosting.engine_host import EngineHost
from headrace.jobs.shards.attempt import ShardAttempt
from headrace.jobs.spec.schemas import JobSpec
from headrace.storage.ledger.ledger import Ledger
from headrace.storage.ledger.records import NewJob, NewShard
from headrace.storage.rows.spool import PlannedRow, write_shard

from ..engine.fakes import FakeRunner, fake_engine
from ..storage.ledger.claiming import claimed
from .shop import NO_TYPES, shard_runner, worker_tools

BLOCK_SIZE = 4
PREFIXES, SHARDS_OF_A_PREFIX, ROWS_OF_A_SHARD, WORKERS = 8, 6, 2, 3
PREFIX_TOKENS = 24
JOB, QUEUE = "job_1", "q"


class Hall:
    """A job whose rows have one of several prefixes, and workers with an engine each that keeps about one of them."""

    def __init__(self, folder: Path, model: Path, stack: ExitStack) -> None:
        self.ledger = Ledger(f"sqlite:///{folder / 'ledger.db'}")
        stack.callback(self.ledger.close)
        self.ledger.migrate()
        self.num_shards = PREFIXES * SHARDS_OF_A_PREFIX
        spec = JobSpec.parse(model=str(model), sampling={"max_tokens": 1})
        (folder / "out").mkdir()
        shards = [self._shard(folder / "spool", number) for number in range(self.num_shards)]
        num_rows = sum(shard.num_rows for shard in shards)
        job = NewJob(JOB, QUEUE, str(model), str(folder / "out"), "f", num_rows, spec=spec.model_dump(mode="json"))
        self.ledger.create_job(job, shards)
        self.tools = [
            worker_tools(self.ledger, stack.enter_context(_host()), model, folder, flush_seconds=10.0)
            for _ in range(WORKERS)
        ]

    def _shard(self, folder: Path, number: int) -> NewShard:
        prefix = [1 + number // SHARDS_OF_A_PREFIX] * PREFIX_TOKENS
        first = number * ROWS_OF_A_SHARD
        rows = [
            PlannedRow(row, str(row), {}, [*prefix, 1 + row % 10, 1 + row // 10], None)
            for row in range(first, first + ROWS_OF_A_SHARD)
        ]
        path = folder / f"{number}.parquet"
        write_shard(path, rows, NO_TYPES)
        return NewShard(number, len(rows), str(path))

    def computed_tokens(self) -> int:
        progress = self.ledger.progress(JOB)
        assert progress.rows_done == progress.rows_total == self.num_shards * ROWS_OF_A_SHARD
        return progress.prompt_tokens - progress.cached_tokens


def _host() -> EngineHost:
    config = EngineConfig(block_size=BLOCK_SIZE, max_num_seqs=2)
    return EngineHost(fake_engine(FakeRunner(num_blocks=16, block_size=BLOCK_SIZE), config))


@pytest.fixture
def open_hall(tmp_path: Path, model: Path) -> Iterator[Callable[[str], Hall]]:
    with ExitStack() as stack:

        def open_hall(name: str) -> Hall:
            (tmp_path / name).mkdir()
            return Hall(tmp_path / name, model, stack)

        yield open_hall


def test_few_prefixes_are_computed_by_several_workers(open_hall):
    steered = open_hall("steered")
    runners = [shard_runner(tools, QUEUE, f"worker {number}") for number, tools in enumerate(steered.tools)]
    # The first shards are held at the same time, as by real workers.
    claims = [runner._claim() for runner in runners]
    for runner, claim in zip(runners, claims, strict=True):
        assert claim is not None
        runner._attempt(claim)
    for turn in range(steered.num_shards - WORKERS):
        runners[turn % WORKERS].run("a doorbell")
    in_turn = open_hall("in turn")
    for number in range(in_turn.num_shards):
        claim = claimed(in_turn.ledger, f"{JOB}/{number:05d}")
        ShardAttempt(in_turn.tools[number % WORKERS], claim, in_turn.ledger.job(JOB)).run()
    computed, without_steering = steered.computed_tokens(), in_turn.computed_tokens()
    print(f"{computed} prompt tokens computed with steering, {without_steering} without")
    own = steered.num_shards * ROWS_OF_A_SHARD * 2
    # Each prefix once, and once more where one worker's way ends and another's begins.
    assert computed - own <= (PREFIXES + 2 * WORKERS) * PREFIX_TOKENS
    assert without_steering - own >= PREFIXES * WORKERS * PREFIX_TOKENS
