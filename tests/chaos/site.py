"""A job, three workers, an API server and all they stand on."""

import os
import secrets
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from random import Random
from typing import Any, TypeVar

import httpx2
import psutil
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from headrace.engine.text.tokenizer import Tokenizer
from headrace.jobs.client.client import Client, Job
from headrace.jobs.processes import is_alive
from headrace.jobs.settings import Settings
from headrace.storage.errors import LedgerUnavailable
from headrace.storage.ledger.records import JobState

from ..jobs.conftest import wait_until
from ..jobs.forked_worker import FROZEN, PREEMPTED
from ..jobs.running import environment
from .api_process import ApiProcess
from .crew import running_crew
from .databases import LedgerDatabase
from .disk import Disk, small_disk
from .freezing import Frozen
from .long_jobs import FIRST_ROW, LongJob, kinds
from .model import CONTEXT, prompt_of, prompt_text, write_model
from .readers import LIVE_TOKEN

T = TypeVar("T")
LEASE_SECONDS = 1.0
MAX_TOKENS = 12
# A job of so many is a long one.
LONG_ROWS = 2000
NUM_WORKERS = 3
_PROMPT_TOKENS = 4
_PATIENCE_SECONDS = 120.0
_UNREACHABLE = (OSError, RedisError, OperationalError, LedgerUnavailable)


@dataclass(frozen=True)
class Scale:
    """How long a job is and how fast its workers are.

    `long_rows`, of `long_tokens`: of each of the long jobs that run beside it, of which the first is of the kind with
    the number `first_kind`. `database_seconds`: how long the ledger's database is away. `hurries`: whether workers
    notice sooner than usual what is lost. `kills_api_at_first`: while the job is being submitted.
    """

    num_rows: int
    shard_rows: int
    num_seqs: int
    step_seconds: float
    long_rows: int
    long_tokens: int
    database_seconds: float
    hurries: bool = False
    first_kind: int = 0
    kills_api_at_first: bool = True

    def settings(self, database_url: str) -> dict[str, str]:
        return {
            "HEADRACE_SHARD_ROWS": str(self.shard_rows),
            "HEADRACE_LEASE_SECONDS": str(LEASE_SECONDS),
            "HEADRACE_FLUSH_SECONDS": "0.1",
            "HEADRACE_WORKER_CONCURRENCY": "2",
            "HEADRACE_DATABASE_URL": database_url,
            "HEADRACE_TEST_STEP_SECONDS": str(self.step_seconds),
            **({"HEADRACE_TEST_HURRY": "yes"} if self.hurries else {}),
            "HEADRACE_TEST_NUM_SEQS": str(self.num_seqs),
            "HEADRACE_TEST_CONTEXT": str(CONTEXT),
            "HEADRACE_TEST_LEAST_SHOWN": str(_PROMPT_TOKENS),
        }


class Site:
    """Everything of one run, in folders of its own. A `Random` chooses whom something happens to.

    `num_begun`: how often each row came to an engine; `num_resumed`: how often with tokens from before.
    `num_preempted`: how many of them may be due to a live request that took a row's seat. `frozen` gets who was to
    stop before its next commit.
    """

    def __init__(self, stack: ExitStack, folder: Path, scale: Scale, random: Random, database: LedgerDatabase) -> None:
        self.scale, self.random, self.database = scale, random, database
        self.data_dir = folder / "data"
        self.num_begun: Counter[int] = Counter()
        self.num_resumed: Counter[int] = Counter()
        self.num_preempted = 0
        self.long_jobs: list[LongJob] = []
        self._pids, self._log = folder / "pids", folder / "log"
        self._freeze, self.frozen = folder / "freeze", SimpleQueue[Frozen]()
        self.disk: Disk = stack.enter_context(small_disk(self.data_dir / "outputs"))
        env = environment(self.data_dir, HEADRACE_TEST_FREEZE=str(self._freeze), **scale.settings(database.url))
        self.settings = Settings.from_environment(env)
        self.model = write_model(folder / "model")
        self._tokenizer = Tokenizer.from_pretrained(self.model)
        self.client = stack.enter_context(Client(self.settings))
        stack.enter_context(self._workers(env))
        self.api = stack.enter_context(ApiProcess(self.model, env, folder / "api log"))
        self.job: Job = self._submitted()

    def _submitted(self) -> Job:
        """A job that was submitted over HTTP, by a client whose server may have been killed meanwhile."""
        rows = [{"text": prompt_text(row)} for row in range(self.scale.num_rows)]
        body = {"model": "model", "rows": rows, "prompt": "{text}", "sampling": {"max_tokens": MAX_TOKENS}}
        key = {"Idempotency-Key": secrets.token_hex(8)}
        if self.scale.kills_api_at_first:
            self._kill_api_meanwhile(key, body)
        answer = self.api.post("/jobs", key, **body)
        return self.client.job(answer["id"])

    def _kill_api_meanwhile(self, key: dict[str, str], body: dict[str, Any]) -> None:
        first = threading.Thread(target=self._try_to_submit, args=(key, body))
        first.start()
        time.sleep(self.random.uniform(0.0, 1.0))
        self.api.kill()
        self.api.start()
        first.join()

    def _try_to_submit(self, key: dict[str, str], body: dict[str, Any]) -> None:
        try:
            self.api.post("/jobs", key, **body)
        except httpx2.HTTPError:
            return

    def submit_long_job(self, freezes: bool = False) -> LongJob:
        """One of the next kind; its shards come before the others that wait. `freezes`: as `freeze_in` does."""
        number, num_rows = len(self.long_jobs), self.scale.long_rows
        first_row = FIRST_ROW + number * num_rows
        of_kind = kinds(self.scale.long_tokens)
        kind = list(of_kind)[(number + self.scale.first_kind) % len(of_kind)]
        rows = [{"text": prompt_text(first_row + row)} for row in range(num_rows)]
        output = self.data_dir / "outputs" / f"long {number}"
        options: dict[str, Any] = {"prompt": "{text}", "idempotency_key": f"long {number}", **of_kind[kind]}
        if freezes:
            self._freeze_before_commit_to(str(output))
        # What was begun and not recorded is in the way of another try, unless that may take it up.
        job = persistently(lambda: self.client.submit(rows, self.model, output, mode="resume", **options))
        persistently(lambda: job.set_priority(1))
        self.long_jobs.append(LongJob(kind, job, first_row, num_rows, self._tokenizer))
        return self.long_jobs[-1]

    def freeze_in(self, long_job: LongJob) -> None:
        """Have the worker stop that is the next to commit a part of this job."""
        self._freeze_before_commit_to(long_job.job.record.output_dir)

    def _freeze_before_commit_to(self, output: str) -> None:
        written = self._freeze.with_suffix(".new")
        written.write_text(output)
        written.rename(self._freeze)

    def is_resumed(self, long_job: LongJob) -> bool:
        """Whether any row of it was begun with tokens from before."""
        return any(self.num_resumed[long_job.first_row + row] for row in range(long_job.num_rows))

    @property
    def jobs(self) -> list[Job]:
        return [self.job, *(each.job for each in self.long_jobs)]

    @property
    def is_running(self) -> bool:
        return any(job.progress().state is JobState.RUNNING for job in self.jobs)

    @property
    def output(self) -> Path:
        return Path(self.job.record.output_dir)

    @contextmanager
    def _workers(self, env: dict[str, str]) -> Iterator[None]:
        begun, written = os.pipe()
        reader = threading.Thread(target=self._count_begun, args=(begun,))
        arguments = ["tests.jobs.forked_worker", str(self.model), str(self._pids), str(NUM_WORKERS)]
        with running_crew(arguments, env, written, self._log):
            os.close(written)
            reader.start()
            try:
                yield
            finally:
                # Nobody would have one go on that stops now.
                self._freeze.unlink(missing_ok=True)
        reader.join()

    def _count_begun(self, pipe: int) -> None:
        row_of = {tuple(prompt_of(row)): row for row in range(8 * 1000)}
        with os.fdopen(pipe) as lines:
            for words in map(str.split, lines):
                prompt, known = words[:_PROMPT_TOKENS], words[_PROMPT_TOKENS:]
                if prompt[0] == PREEMPTED:
                    self.num_preempted += int(prompt[1])
                elif prompt[0] == FROZEN:
                    self.frozen.put(Frozen.parse(words[1:]))
                elif prompt[0] != str(LIVE_TOKEN):
                    row = row_of[tuple(map(int, prompt))]
                    self.num_begun[row] += 1
                    self.num_resumed[row] += bool(known)

    def worker(self) -> psutil.Process:
        """One of the workers that are there now."""
        while True:
            wait_until(lambda: bool(self.workers()), "a worker has started", _PATIENCE_SECONDS)
            # One that found no database may end meanwhile.
            with suppress(psutil.NoSuchProcess, IndexError):
                return psutil.Process(self.random.choice(self.workers()))

    def workers(self) -> list[int]:
        """The pids of those that are there now."""
        pids = [int(pid) for pid in self._pids.read_text().split()] if self._pids.exists() else []
        return [pid for pid in pids if is_alive(pid)]


@contextmanager
def stopped(process: psutil.Process) -> Iterator[None]:
    """It does nothing meanwhile, and knows nothing of it."""
    with suppress(psutil.NoSuchProcess):
        process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGCONT)


def persistently(call: Callable[[], T]) -> T:
    """While what it wants is about to come back."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            return call()
        except _UNREACHABLE:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
