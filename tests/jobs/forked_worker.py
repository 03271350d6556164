"""Run by the tests: worker processes, one after the other, whose model is a function of its tokens.

    python -m tests.jobs.forked_worker MODEL_FOLDER PIDS

Starts a worker, again whenever one was killed, and appends each one's pid to the file PIDS. A prompt that begins with
the token KILLER really kills the worker that computes it; every other is written to stdout when it is begun, a line
of tokens each. A step takes HEADRACE_TEST_STEP_SECONDS. SIGTERM ends the worker properly, and with it this process.
"""

import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from types import FrameType

from torch import Tensor

from headrace.engine.batch import Batch
from headrace.engine.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.hub import locate_model
from headrace.jobs.processes import die_with_parent
from headrace.jobs.settings import Settings
from headrace.jobs.worker import WorkerOptions, serve

from ..engine.fakes import FakeRunner, fake_engine

KILLER = 9
STEP_SECONDS = float(os.environ.get("HEADRACE_TEST_STEP_SECONDS", "0"))
CONFIG = EngineConfig(block_size=4, max_num_seqs=8, enable_prefix_caching=False)


class KillableRunner(FakeRunner):
    def execute(self, batch: Batch) -> Tensor:
        tokens, positions = batch.token_ids.tolist(), batch.positions.tolist()
        spans = zip(batch.attention.query_starts, batch.attention.query_lens, strict=True)
        begun = [tokens[start : start + length] for start, length in spans if positions[start] == 0]
        if any(prompt[0] == KILLER for prompt in begun):
            os.kill(os.getpid(), signal.SIGKILL)
        if begun:
            # In one write, which a pipe keeps whole.
            os.write(1, "".join(" ".join(map(str, prompt)) + "\n" for prompt in begun).encode())
        time.sleep(STEP_SECONDS)
        return super().execute(batch)


def load(folder: Path, config: EngineConfig) -> Engine:
    return fake_engine(KillableRunner(64, config.block_size), config)


def work(model: str) -> int:
    settings = Settings.from_environment()
    return serve(settings, WorkerOptions(locate_model(model, None), CONFIG, settings.worker_concurrency), load)


def _pass_on(child: int, signum: int, frame: FrameType | None) -> None:
    os.kill(child, signum)


def main(model: str, pids: Path) -> int:
    parent = os.getpid()
    while True:
        # Forked, so that torch is imported once and a worker is back in a moment.
        child = os.fork()
        if child == 0:
            die_with_parent(parent, signal.SIGKILL)
            sys.exit(work(model))
        signal.signal(signal.SIGTERM, partial(_pass_on, child))
        with pids.open("a") as file:
            file.write(f"{child}\n")
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status != -signal.SIGKILL:
            return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
