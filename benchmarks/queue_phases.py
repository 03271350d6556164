"""Each step of a row's way through the queue by itself, in one process: where the time of `bench_queue.py` goes."""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

from headrace.engine.checkpoints.hub import LocatedModel
from headrace.engine.checkpoints.model_config import ModelConfig
from headrace.engine.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.text.tokenizer import Tokenizer
from headrace.jobs.hosting.engine_host import EngineHost
from headrace.jobs.hosting.outcomes import Outcome
from headrace.jobs.planning.planner import Planner, make_planner
from headrace.jobs.shards.receipts import Computation, Receipts
from headrace.jobs.shards.row_batch import RowBatch
from headrace.jobs.shards.row_requests import RowRequests
from headrace.jobs.shards.weights import ModelWeights
from headrace.jobs.spec.schemas import JobSpec
from headrace.storage.ledger.ledger import Ledger
from headrace.storage.ledger.records import NewJob, NewShard
from headrace.storage.output.local_folder import LocalFolder
from headrace.storage.output.parts import part_file_name, part_summary
from headrace.storage.readers import InputSource
from headrace.storage.rows.spool import read_shard

JOB, QUEUE = "job", "queue"


class Stopwatch:
    """Seconds by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start


def measure_phases(
    folder: Path, source: InputSource, model: Path, engine: Engine, shard_rows: int | None
) -> dict[str, float]:
    """Seconds of all rows of `source` in each phase, one after the other; a job's phases overlap where they can."""
    timed = Stopwatch()
    spec = JobSpec.parse(model=str(model), prompt="{text}", sampling={"max_tokens": 1})
    # As a worker does.
    gc.collect()
    gc.freeze()
    planner = make_planner(spec, shard_rows, folder)
    shards = _planned(timed, planner, source, folder)
    ledger = Ledger(f"sqlite:///{folder / 'phases.db'}")
    ledger.migrate()
    output = folder / "phases-out"
    output.mkdir()
    num_rows = sum(shard.num_rows for shard in shards)
    with timed("record the job"):
        ledger.create_job(NewJob(JOB, QUEUE, str(model), str(output), "f", num_rows), shards)
    tokenizer = Tokenizer.from_pretrained(model)
    computation = Computation.of(EngineConfig(), ModelConfig.from_pretrained(model))
    weights = ModelWeights(LocatedModel(str(model), model))
    # A worker has read them before it takes its first shard.
    weights.identity()
    receipts = Receipts(weights, computation)
    after: dict[str, int] = {}
    with EngineHost(engine) as host:
        for _ in shards:
            _answered(timed, ledger, host, planner.spec, tokenizer, receipts, output, after)
    ledger.close()
    return timed.seconds


def _planned(timed: Stopwatch, planner: Planner, source: InputSource, folder: Path) -> list[NewShard]:
    planner.check(source)
    with timed("read and parse"):
        for _ in source:
            pass
    planning = planner.plan(source)
    with timed("read, render, tokenize, sort"):
        plan = planning.__enter__()
    with timed("cut and spool"):
        shards = plan.spool(folder / "phases-spool")
    planning.__exit__(None, None, None)
    return shards


def _answered(
    timed: Stopwatch,
    ledger: Ledger,
    host: EngineHost,
    spec: JobSpec,
    tokenizer: Tokenizer,
    receipts: Receipts,
    output: Path,
    after: dict[str, int],
) -> None:
    with timed("claim"):
        claim = ledger.leases.claim_next(QUEUE, "worker", 60, after)
    assert claim is not None
    after[JOB] = claim.shard_number
    with timed("read a shard, make requests"):
        table, receipt = read_shard(Path(claim.spool_path)), receipts.of_attempt(claim.attempt_number)
        batch = RowBatch(table, (), RowRequests(spec, tokenizer, str(claim.attempt_id)), receipt)
        requests = batch.requests
    outcomes: SimpleQueue[list[Outcome]] = SimpleQueue()
    with timed("engine and its host"):
        host.submit_rows(requests, outcomes.put)
        answers = _drained(outcomes.get, len(requests))
    with timed("answers to columns"):
        batch.record(answers)
        table = batch.take_finished()
    name = part_file_name(claim.job_id, claim.shard_number, claim.attempt_id, 0)
    with timed("write and sync parts"):
        LocalFolder(output).write_part(name, table)
    with timed("commit"):
        ledger.leases.commit_part(claim, part_summary(name, table))
    with timed("publish"):
        LocalFolder(output).publish(name)
    with timed("commit"):
        ledger.leases.finish_shard(claim)


def _drained(get: Callable[[], list[Outcome]], count: int) -> list[Outcome]:
    outcomes: list[Outcome] = []
    while len(outcomes) < count:
        outcomes += get()
    return outcomes
