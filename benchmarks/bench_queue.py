"""Rows through the whole queue path, from submit to committed Parquet, with a model that answers at once.

    python benchmarks/bench_queue.py [--rows 20000] [--celery-rows 5000] [--shard-rows 1024] [--workers 1] [--kills 0]
                                      [--output FILE]

Each worker is a process of its own, as in production, with the ticket model's tokenizer and an engine whose model
computes nothing. With `--kills` one of them is killed with -9 now and then, and another started. Every row has to come
out once. Then each phase by itself, in one process, for 20,000 rows at most. For comparison the same rows as one Celery
task each, through the same Valkey, with as many workers and the answers in a Redis list. `--shard-rows 0` is what
Headrace does by itself. The last line is JSON.
"""

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.dataset as ds
import torch
from bench_scheduler import NoOpRunner
from celery import Celery
from queue_phases import measure_phases
from redis import Redis
from report import ROOT, print_result

from headrace.engine.checkpoints.hub import locate_model
from headrace.engine.checkpoints.model_config import ModelConfig
from headrace.engine.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.jobs.broker.celery_app import broker_url
from headrace.jobs.broker.redis_access import redis_server
from headrace.jobs.client.client import Client, Job
from headrace.jobs.processes import num_cores
from headrace.jobs.settings import Settings
from headrace.jobs.workers.worker import WorkerOptions, serve
from headrace.storage.ledger.records import JobState
from headrace.storage.readers import open_input

MODEL = ROOT / "examples" / "tickets" / "model"
ENGINE = EngineConfig(max_num_seqs=1024, max_num_batched_tokens=65536)
# What a pool of threads was fastest with, when one task was one prompt.
CELERY_THREADS = 8
CELERY_QUEUE, ANSWERS = "bench.celery", "bench:answers"
PATIENCE_SECONDS = 600.0
PHASE_ROWS = 20_000


def load(folder: Path, config: EngineConfig) -> Engine:
    """An engine whose model says token 0 whatever it is asked."""
    model = ModelConfig.from_pretrained(folder)
    runner = NoOpRunner(num_blocks=100_000)
    runner.vocab_size = model.vocab_size
    runner._logits = torch.eye(1, model.vocab_size)[0]
    return Engine(runner, config, model.max_position_embeddings)


def work() -> None:
    logging.basicConfig(level=logging.INFO)
    settings = Settings.from_environment()
    options = WorkerOptions(locate_model(str(MODEL), None), ENGINE, settings.worker_concurrency)
    serve(settings, options, load)


def celery_app(redis_url: str) -> Celery:
    app = Celery("bench", broker=broker_url(redis_url), set_as_current=False)
    app.conf.update(task_ignore_result=True, worker_enable_remote_control=False)
    return app


def work_for_celery(redis_url: str, own_queue: str) -> None:
    app = celery_app(redis_url)
    redis = Redis.from_url(redis_url)

    def answer(row: int, text: str) -> None:
        redis.rpush(ANSWERS, json.dumps({"row": row, "text": text, "output": ""}))

    app.task(name="bench.answer")(answer)
    options = ["--pool", "threads", "--concurrency", str(CELERY_THREADS), "--queues", f"{CELERY_QUEUE},{own_queue}"]
    app.worker_main(["worker", "--loglevel", "WARNING", "--without-gossip", "--without-mingle", *options])


def peak_bytes(pid: int | str = "self") -> int:
    """A process's own peak: `ru_maxrss` begins with its parent's."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:"))


@contextmanager
def started(arguments: list[str], env: dict[str, str], log: Path) -> "Iterator[subprocess.Popen[str]]":
    """This script in a worker's role."""
    command = [sys.executable, __file__, *arguments]
    with (
        log.open("w") as err,
        subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=err, text=True) as process,
    ):
        try:
            yield process
        finally:
            process.terminate()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"nothing happened for {PATIENCE_SECONDS:.0f} s")
        time.sleep(0.01)


def write_input(path: Path, num_rows: int) -> None:
    with path.open("w", encoding="utf-8") as file:
        for row in range(num_rows):
            file.write(json.dumps(row_of(row)) + "\n")


def row_of(row: int) -> dict[str, str]:
    return {"text": f"Ticket {row}: my parcel {row * 7919 % 100_003} has not arrived, please refund the order."}


class Workers:
    """A number of workers, each a process of its own, for as long as the context lasts."""

    def __init__(self, folder: Path, number: int, env: dict[str, str], stack: ExitStack) -> None:
        self._folder = folder
        # Idle threads of one worker's tensor operations would spin on the other's core.
        self._env = {"OMP_NUM_THREADS": str(max(1, num_cores() // number)), **env}
        self._stack = stack
        self._num_started = 0
        self._processes: list[subprocess.Popen[str]] = []
        for _ in range(number):
            self._start()
        wait_until(lambda: all("serving" in log.read_text() for log in folder.glob("worker-*.log")))

    def _start(self) -> None:
        log = self._folder / f"worker-{self._num_started}.log"
        self._processes.append(self._stack.enter_context(started(["--work"], self._env, log)))
        self._num_started += 1

    def kill_one(self) -> None:
        """The one that has worked for longest; another takes its place."""
        killed = self._processes.pop(0)
        killed.kill()
        killed.wait()
        self._start()

    def peak_bytes(self) -> int:
        return max(peak_bytes(process.pid) for process in self._processes)


def measure_headrace(options: argparse.Namespace, folder: Path, env: dict[str, str]) -> dict[str, Any]:
    num_rows, num_workers = options.rows, options.workers
    settings = Settings.from_environment(env)
    source = folder / "input.jsonl"
    write_input(source, num_rows)
    with Client(settings) as client, ExitStack() as stack:
        workers = Workers(folder, num_workers, env, stack)
        start = time.perf_counter()
        job = client.submit(source, MODEL, folder / "out", prompt="{text}", max_tokens=1)
        submitted, submit_bytes = time.perf_counter(), peak_bytes()
        print(f"submitted after {submitted - start:.1f} s", flush=True)
        for kill in range(options.kills):
            wait_for_rows(job, num_rows * (kill + 1) // (options.kills + 1))
            workers.kill_one()
        wait_for_rows(job, num_rows)
        progress = job.wait(PATIENCE_SECONDS, start_worker=False)
        end = time.perf_counter()
        ledger_bytes = sum(file.stat().st_size for file in settings.data_dir.glob("headrace.db*"))
        worker_bytes = workers.peak_bytes()
    parts = sorted(map(str, (folder / "out").glob("*.parquet")))
    assert progress.state is JobState.COMPLETED
    assert_each_row_once(parts, num_rows)
    return {
        "rows": num_rows,
        "workers": num_workers,
        "kills": options.kills,
        "parts": len(parts),
        "submit_seconds": submitted - start,
        "seconds": end - start,
        "rows_per_second": num_rows / (end - start),
        "rows_per_second_after_submit": num_rows / (end - submitted),
        "submit_peak_bytes": submit_bytes,
        "worker_peak_bytes": worker_bytes,
        "ledger_bytes": ledger_bytes,
    }


def wait_for_rows(job: Job, num_rows: int) -> None:
    """Until so many are done. Raises TimeoutError when none is for too long, RuntimeError where no more will be."""
    done, deadline = -1, 0.0
    while (progress := job.progress()).rows_done < num_rows:
        if progress.state.has_ended:
            raise RuntimeError(f"the job is {progress.state}: {progress.error}")
        if progress.rows_done > done:
            done, deadline = progress.rows_done, time.monotonic() + PATIENCE_SECONDS
        if time.monotonic() > deadline:
            raise TimeoutError(f"no row was done for {PATIENCE_SECONDS:.0f} s")
        time.sleep(0.2)


def assert_each_row_once(parts: Sequence[str], num_rows: int) -> None:
    counts = np.zeros(num_rows, np.int64)
    for batch in ds.dataset(parts).to_batches(columns=["row", "error"]):
        np.add.at(counts, batch["row"].to_numpy(), 1)
        assert batch["error"].null_count == batch.num_rows
    assert (counts == 1).all()


def measure_celery(folder: Path, num_rows: int, num_workers: int, env: dict[str, str]) -> dict[str, Any]:
    with redis_server(Settings.from_environment(env)) as server, Redis.from_url(server.url) as redis:
        app = celery_app(server.url)
        with ExitStack() as stack:
            for number in range(num_workers):
                queue, log = f"{CELERY_QUEUE}.{number}", folder / f"celery-{number}.log"
                stack.enter_context(started(["--celery-work", server.url, queue], env, log))
                app.send_task("bench.answer", args=[-1, "warm-up"], queue=queue)
            wait_until(lambda: redis.llen(ANSWERS) == num_workers)
            start = time.perf_counter()
            for row in range(num_rows):
                app.send_task("bench.answer", args=[row, row_of(row)["text"]], queue=CELERY_QUEUE)
            wait_until(lambda: redis.llen(ANSWERS) == num_rows + num_workers)
            seconds = time.perf_counter() - start
        app.close()
    return {"rows": num_rows, "workers": num_workers, "seconds": seconds, "rows_per_second": num_rows / seconds}


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    env = {**os.environ, "HEADRACE_DATA_DIR": str(folder / "data")}
    if options.shard_rows:
        env["HEADRACE_SHARD_ROWS"] = str(options.shard_rows)
    headrace = measure_headrace(options, folder, env)
    seconds, mib, kib = (
        headrace["submit_seconds"],
        headrace["worker_peak_bytes"] / 2**20,
        headrace["ledger_bytes"] / 2**10,
    )
    print(f"{headrace['rows']:,} rows at {headrace['rows_per_second']:,.0f}/s, {seconds:.1f} s of it to submit")
    submitter = headrace["submit_peak_bytes"] / 2**20
    print(f"peak memory: submitter {submitter:,.0f} MiB, worker {mib:,.0f} MiB; ledger {kib:,.0f} KiB")
    source = open_input(folder / "input.jsonl", PHASE_ROWS)
    phases = measure_phases(folder, source, MODEL, load(MODEL, ENGINE), options.shard_rows or None)
    num_rows = min(PHASE_ROWS, options.rows)
    for phase, seconds in phases.items():
        print(f"  {phase}: {seconds / num_rows * 1e6:.1f} µs a row")
    if not options.celery_rows:
        return {"headrace": headrace, "phase_seconds": phases}
    celery = measure_celery(folder, options.celery_rows, options.workers, env)
    ratio = headrace["rows_per_second"] / celery["rows_per_second"]
    print(f"{celery['rows']:,} rows as one Celery task each: {celery['rows_per_second']:,.0f}/s, 1/{ratio:.1f} of that")
    return {"headrace": headrace, "phase_seconds": phases, "celery": celery, "ratio": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--celery-rows", type=int, default=5_000)
    parser.add_argument("--shard-rows", type=int, default=1024)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--output", type=Path, help="where to write the figures as well")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--celery-work", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work()
    elif options.celery_work:
        work_for_celery(*options.celery_work)
    else:
        with tempfile.TemporaryDirectory() as folder:
            print_result("queue", {"shard_rows": options.shard_rows, **measure(options, Path(folder))}, options.output)


if __name__ == "__main__":
    main()
