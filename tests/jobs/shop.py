"""One job of one shard, and everything a worker needs to run it."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from headrace.engine.checkpoints.hub import LocatedModel
from headrace.engine.config import EngineConfig
from headrace.engine.request import Request
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.text.tokenizer import Tokenizer
from headrace.jobs.hosting.engine_host import EngineHost
from headrace.jobs.shards.adapters import FittingAdapters
from headrace.jobs.shards.answer_cache import AnswerCache
from headrace.jobs.shards.attempt import AttemptTools, ShardAttempt
from headrace.jobs.shards.checkpoints import TokenCheckpoints
from headrace.jobs.shards.receipts import Computation, Receipts
from headrace.jobs.shards.row_streams import RowStreams
from headrace.jobs.shards.runner import ShardRunner
from headrace.jobs.shards.weights import ModelWeights
from headrace.jobs.spec.sampling import row_seed
from headrace.jobs.spec.schemas import JobSpec
from headrace.jobs.streams.publisher import StreamPublisher
from headrace.jobs.streams.row_watch import RowWatch
from headrace.storage.ledger.ledger import Ledger
from headrace.storage.ledger.records import Claim, JobState, NewJob, NewShard
from headrace.storage.output.manifest import MANIFEST_NAME
from headrace.storage.result_cache import ResultCache
from headrace.storage.rows.spool import PlannedRow, write_shard

from ..engine.fakes import CONTEXT, fake_answer
from ..storage.ledger.claiming import take_shard
from .answers import GatedRunner

JOB, SHARD, QUEUE = "job_1", "job_1/00000", "q"
COMPUTATION = Computation("float32", None, "float32", "cpu", "0.1", "2.6")
LONG, OVER = 60.0, -1.0
NO_TYPES = pa.schema([])


def worker_tools(ledger: Ledger, host: EngineHost, model: Path, folder: Path, flush_seconds: float) -> AttemptTools:
    """Of a worker without Redis: rows' streams, checkpoints and the result cache do nothing."""
    redis_url = f"unix://{folder}/no-redis.sock"
    tokenizer, weights = Tokenizer.from_pretrained(model), ModelWeights(LocatedModel(str(model), model))
    return AttemptTools(
        ledger,
        host,
        tokenizer,
        RowStreams(host, tokenizer, StreamPublisher(redis_url), RowWatch(redis_url)),
        TokenCheckpoints(redis_url, host, ttl_seconds=600),
        AnswerCache(ResultCache(redis_url, ttl_seconds=600), weights),
        Receipts(weights, COMPUTATION),
        flush_seconds,
        write_seconds=0.0,
        store_seconds=0.0,
    )


def shard_runner(tools: AttemptTools, queue: str, owner: str) -> ShardRunner:
    """A worker's, which rings for nobody."""
    adapters = FittingAdapters(EngineConfig())
    return ShardRunner(tools, queue, owner, LONG, tools.receipts.weights, adapters, lambda shard_ids: None)


@dataclass
class Shop:
    """One job of one shard in a ledger, a worker's tools to run it with, and what comes of it.

    The engine computes one sequence at a time, in the order of the rows.
    """

    folder: Path
    model: Path
    ledger: Ledger
    runner: GatedRunner
    host: EngineHost
    owners: Iterator[int]
    rows: list[PlannedRow] = field(default_factory=list)
    spec: JobSpec = field(init=False)
    # Whether the job writes into a bucket of the object store, whose objects are files of that folder.
    in_store: bool = False

    @property
    def output(self) -> Path:
        return self.folder / "shelf" / "out" if self.in_store else self.folder / "out"

    @property
    def address(self) -> str:
        return "shelf://out" if self.in_store else str(self.output)

    @cached_property
    def tools(self) -> AttemptTools:
        return worker_tools(self.ledger, self.host, self.model, self.folder, flush_seconds=0.01)

    def create(
        self,
        rows: Sequence[PlannedRow],
        types: pa.Schema = NO_TYPES,
        within_seconds: float | None = None,
        **spec: Any,
    ) -> None:
        self.rows = list(rows)
        self.spec = JobSpec.parse(model=str(self.model), **spec)
        spool = self.folder / "jobs" / JOB / "shard.parquet"
        write_shard(spool, rows, types)
        self.output.mkdir()
        job = NewJob(
            id=JOB,
            queue=QUEUE,
            model=str(self.model),
            output_dir=self.address,
            fingerprint="f",
            num_rows=len(rows),
            spec=self.spec.stored(),
            within_seconds=within_seconds,
        )
        self.ledger.create_job(job, [NewShard(0, len(rows), str(spool))])

    def claim(self, lease_seconds: float = LONG) -> Claim:
        claim = take_shard(self.ledger, SHARD, f"worker {next(self.owners)}", lease_seconds)
        assert claim is not None
        return claim

    def attempt(self, claim: Claim | None = None, tools: AttemptTools | None = None) -> ShardAttempt:
        return ShardAttempt(tools or self.tools, claim or self.claim(), self.ledger.job(JOB))

    def shard_runner(self) -> ShardRunner:
        """A worker's, after its sweeper has put back what a dead worker held."""
        self.ledger.messages.requeue_expired(QUEUE)
        return shard_runner(self.tools, QUEUE, f"worker {next(self.owners)}")

    def params(self, row: int, choices: tuple[str, ...] | None = None) -> SamplingParams:
        """A row's, with its own seed."""
        return self.spec.sampling.params(choices).with_seed(row_seed(self.spec.sampling.seed, row))

    def answer(self, row: int) -> list[int]:
        """The tokens of a row that has the engine for itself."""
        prompt = self.rows[row].prompt_token_ids or []
        return fake_answer(Request("r", prompt, self.params(row)), CONTEXT)

    def text(self, row: int) -> str:
        return self.tools.tokenizer.decode(self.answer(row))

    def permit_rows(self, *rows: int) -> None:
        """Let the engine do the steps of these rows."""
        self.runner.permit(sum(len(self.answer(row)) for row in rows))

    def num_committed(self) -> int:
        return self.ledger.progress(JOB).rows_done

    def num_published(self) -> int:
        """Rows that readers of the folder see: a moment after they are committed."""
        return sum(pq.read_metadata(path).num_rows for path in self.output.glob("*.parquet"))

    def table(self) -> pa.Table:
        return ds.dataset(sorted(map(str, self.output.glob("*.parquet")))).to_table().sort_by("row")

    def files(self) -> dict[str, int]:
        """All parts in the output folder, hidden ones too, and what is left of any, with the times of their changes."""
        names = sorted({*os.listdir(self.output)} - {MANIFEST_NAME})
        return {name: (self.output / name).stat().st_mtime_ns for name in names}

    def assert_complete(self) -> None:
        """Each row once, answered or refused as it should be, and ledger and folder agreeing."""
        table = self.table()
        assert table["row"].to_pylist() == [row.row for row in self.rows]
        for row, output, error in zip(self.rows, table["output"].to_pylist(), table["error"].to_pylist(), strict=True):
            assert error == row.error
            assert output == (None if row.error else self.text(row.row))
        self.assert_settled()

    def assert_settled(self) -> None:
        parts = self.ledger.parts(JOB)
        assert list(self.files()) == sorted(part.file_name for part in parts)
        table, progress = self.table(), self.ledger.progress(JOB)
        assert (progress.state, progress.shards_done) == (JobState.COMPLETED, 1)
        assert progress.rows_done == table.num_rows == progress.rows_total
        assert progress.rows_failed == table.num_rows - table["error"].null_count
        for name in ("prompt_tokens", "cached_tokens", "completion_tokens"):
            assert getattr(progress, name) == sum(table[name].to_pylist())
