"""Run by the tests: worker processes whose model is a function of its tokens.

    python -m tests.jobs.forked_worker MODEL_FOLDER PIDS [WORKERS]

Starts so many workers (1), another whenever one was killed, and appends each one's pid to the file PIDS. A prompt that
begins with the token KILLER really kills the worker that computes it; of every other the first tokens (32, or
HEADRACE_TEST_SHOWN_TOKENS) are written to stdout when it is begun, a line each, as soon as there are
HEADRACE_TEST_LEAST_SHOWN (1) of them, and how many sequences had to make room for others. A step takes
HEADRACE_TEST_STEP_SECONDS, a batch has at most HEADRACE_TEST_NUM_SEQS sequences of HEADRACE_TEST_CONTEXT tokens. With
HEADRACE_TEST_HURRY they sweep more often, take messages for lost sooner and write down shorter rows. The next one that
has written a part into the output folder which the file HEADRACE_TEST_FREEZE names removes that file, says on stdout
who it is and what it was about to commit, and stops itself with SIGSTOP before it does. While the file
HEADRACE_TEST_HOLD exists, no sequence gets more than HEADRACE_TEST_HOLD_TOKENS (24) tokens.
SIGTERM ends the workers properly, and with them this process.
"""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from torch import Tensor

from headrace.engine.checkpoints.hub import locate_model
from headrace.engine.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.execution.batch import Batch
from headrace.jobs.processes import die_with_parent
from headrace.jobs.settings import Settings
from headrace.jobs.shards import sweeper as sweeper_module
from headrace.jobs.shards.checkpoints import TokenCheckpoints
from headrace.jobs.shards.part_writer import PartWriter
from headrace.jobs.workers import worker as worker_module
from headrace.jobs.workers.worker import WorkerOptions, serve
from headrace.storage.errors import LedgerUnavailable

from ..engine.fakes import CONTEXT, FakeRunner, fake_engine
from .transactions import Transactions

KILLER = 9
PREEMPTED = "preempted"
FROZEN = "frozen"
STEP_SECONDS = float(os.environ.get("HEADRACE_TEST_STEP_SECONDS", "0"))
NUM_SEQS = int(os.environ.get("HEADRACE_TEST_NUM_SEQS", "8"))
MAX_TOKENS = int(os.environ.get("HEADRACE_TEST_CONTEXT", str(CONTEXT)))
_SHOWN_TOKENS = int(os.environ.get("HEADRACE_TEST_SHOWN_TOKENS", "32"))
_LEAST_SHOWN = int(os.environ.get("HEADRACE_TEST_LEAST_SHOWN", "1"))
_HOLD = Path(os.environ.get("HEADRACE_TEST_HOLD", "/nowhere/hold"))
_HOLD_TOKENS = int(os.environ.get("HEADRACE_TEST_HOLD_TOKENS", "24"))
_PAUSE_SECONDS = 0.1
_HURRY: list[tuple[ModuleType, str, Any]] = [
    (worker_module, "SWEEP_SECONDS", 0.3),
    (worker_module, "TokenCheckpoints", partial(TokenCheckpoints, min_tokens=16)),
    (sweeper_module, "_LOST_MESSAGE_SECONDS", 1.0),
]
CONFIG = EngineConfig(block_size=4, max_num_seqs=NUM_SEQS, enable_prefix_caching=False)


class KillableRunner(FakeRunner):
    engine: Engine | None = None
    _num_preemptions = 0

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        # By its first block, of each that is begun and not shown, as its first step had no room for more of it.
        self._short: dict[int, list[int]] = {}

    def execute(self, batch: Batch) -> Tensor:
        positions = batch.positions.tolist()
        begun = list(self._begun(batch, positions))
        while max(positions) >= _HOLD_TOKENS and _HOLD.exists():
            time.sleep(0.005)
        if any(prompt[0] == KILLER for prompt in begun):
            os.kill(os.getpid(), signal.SIGKILL)
        # First, as those who had to make room may be among those that are begun.
        self._tell_of_preemptions()
        if begun:
            # In one write, which a pipe keeps whole.
            os.write(1, "".join(" ".join(map(str, prompt)) + "\n" for prompt in begun).encode())
        time.sleep(STEP_SECONDS)
        return super().execute(batch)

    def _begun(self, batch: Batch, positions: list[int]) -> Iterator[list[int]]:
        tokens, attention = batch.token_ids.tolist(), batch.attention
        spans = zip(attention.query_starts, attention.query_lens, attention.block_tables, strict=True)
        for start, length, table in spans:
            before = self._short.pop(table[0], None)
            if positions[start] == 0:
                before = []
            if before is None or len(before) != positions[start]:
                continue
            prompt = [*before, *tokens[start : start + length]]
            if len(prompt) < _LEAST_SHOWN:
                self._short[table[0]] = prompt
            else:
                yield prompt[:_SHOWN_TOKENS]

    def _tell_of_preemptions(self) -> None:
        num_preemptions = self.engine.stats.num_preemptions if self.engine else 0
        if num_preemptions > self._num_preemptions:
            os.write(1, f"{PREEMPTED} {num_preemptions - self._num_preemptions}\n".encode())
            self._num_preemptions = num_preemptions


def load(folder: Path, config: EngineConfig) -> Engine:
    num_blocks = config.max_num_seqs * MAX_TOKENS // config.block_size
    runner = KillableRunner(num_blocks, config.block_size)
    runner.engine = fake_engine(runner, config, MAX_TOKENS)
    return runner.engine


def freeze_before_commits(file: Path) -> None:
    """Have whoever is about to commit a part look for the file, and stop the process where it is found."""
    record, transactions = PartWriter._record, Transactions()

    def freeze(writer: PartWriter) -> None:
        claim = writer.claim
        with suppress(FileNotFoundError):
            if file.read_text() != str(writer.folder):
                return
            file.unlink()
            # Not in the midst of another thread's transaction, which might keep all others from the ledger.
            with transactions.none_open():
                os.write(1, f"{FROZEN} {os.getpid()} {claim.shard_id} {claim.attempt_id}\n".encode())
                # Sent to this very thread, which then goes no further; all others are stopped with it.
                signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)

    def freeze_and_record(writer: PartWriter, *arguments: Any) -> None:
        freeze(writer)
        record(writer, *arguments)

    PartWriter._record = freeze_and_record  # type: ignore[assignment, method-assign]


def work(model: str) -> int:
    if "HEADRACE_TEST_HURRY" in os.environ:
        for module, name, value in _HURRY:
            assert hasattr(module, name), f"{module.__name__} has no {name} any more"
            setattr(module, name, value)
    if (freeze := os.environ.get("HEADRACE_TEST_FREEZE")) is not None:
        freeze_before_commits(Path(freeze))
    settings = Settings.from_environment()
    try:
        return serve(settings, WorkerOptions(locate_model(model, None), CONFIG, settings.worker_concurrency), load)
    except LedgerUnavailable as error:
        print(error, file=sys.stderr)
        return os.EX_TEMPFAIL


class Crew:
    """So many workers, and another in the place of each that was killed, or could not begin without its database."""

    def __init__(self, model: str, pids: Path, size: int) -> None:
        self._model, self._pids, self._size = model, pids, size
        self._workers: set[int] = set()
        self._stopping = False

    def run(self) -> int:
        """Until told to stop, or one ends by itself; the worst exit status."""
        signal.signal(signal.SIGTERM, self._stop)
        die_with_parent(os.getppid())
        while not self._stopping and len(self._workers) < self._size:
            self._start()
        worst = 0
        while self._workers:
            pid, status = os.wait()
            self._workers.remove(pid)
            code = os.waitstatus_to_exitcode(status)
            # One that had only begun to start has no handler of its own yet.
            if code not in (-signal.SIGKILL, -signal.SIGTERM, os.EX_TEMPFAIL):
                self._stop()
                worst = worst or code
            elif not self._stopping:
                time.sleep(_PAUSE_SECONDS)
                self._start()
        return worst

    def _start(self) -> None:
        parent = os.getpid()
        # Told to end before it has laid down our handler, it would take that for its own and go on for ever.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        # Forked, so that torch is imported once and a worker is back in a moment.
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
            die_with_parent(parent, signal.SIGKILL)
            sys.exit(work(self._model))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        self._workers.add(child)
        with self._pids.open("a") as file:
            file.write(f"{child}\n")
        if self._stopping:
            os.kill(child, signal.SIGTERM)

    def _stop(self, signum: int = 0, frame: FrameType | None = None) -> None:
        self._stopping = True
        for worker in self._workers:
            with suppress(ProcessLookupError):
                os.kill(worker, signal.SIGTERM)


if __name__ == "__main__":
    # Celery's loggers say nothing where nothing is set up.
    logging.basicConfig(level=logging.WARNING)
    sys.exit(Crew(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 1).run())
