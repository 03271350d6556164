"""How long the rows of a worker that was killed with -9 wait until another worker runs them again.

    python benchmarks/bench_recovery.py [--runs 5] [--output FILE]

Two workers of the ticket model with the default settings (leases of 6 s), 32 sequences at a time, and a job of one
shard, so that one of them is busy and the other idle. The busy one is killed once it has committed some rows and has
others in its engine. Counted from there until the other has taken the shard over (`seconds`), and until it has
committed rows of it (`seconds_to_first_commit`). Every row has to come out once. The last line is JSON.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from report import ROOT, print_result, spread

from headrace.jobs.client.client import Client, Job
from headrace.jobs.settings import Settings
from headrace.jobs.workers.presence import WorkerId
from headrace.storage.ledger.records import AttemptRecord, JobState

MODEL = ROOT / "examples" / "tickets" / "model"
# Rows finish in waves, so that some are committed while others are in the engine.
OPTIONS = ("--model", str(MODEL), "--max-num-seqs", "32")
WORKER = (sys.executable, "-P", "-m", "headrace.jobs.cli", "worker", *OPTIONS)
NUM_WORKERS = 2
# One shard by default, and seconds of work for one core.
NUM_ROWS, MAX_TOKENS = 256, 128
PATIENCE_SECONDS = 60.0


@contextmanager
def worker(env: dict[str, str], log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    with log.open("wb") as file:
        process = subprocess.Popen(WORKER, env=env, stdout=file, stderr=file)
    try:
        wait_until(lambda: "serving" in log.read_text())
        yield process
    finally:
        process.terminate()
        process.wait(PATIENCE_SECONDS)


def wait_until(condition: Callable[[], bool]) -> float:
    """When it was so, as `time.monotonic` counts."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"nothing happened for {PATIENCE_SECONDS:.0f} s")
        time.sleep(0.01)
    return time.monotonic()


def attempts(client: Client, job: Job) -> list[AttemptRecord]:
    return client.ledger.attempts(client.ledger.shards(job.id)[0].id)


def recover(folder: Path) -> tuple[float, float]:
    """Seconds from the kill to the next attempt, and to what that commits first."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    env = {**ours, "HEADRACE_DATA_DIR": str(folder / "data"), "OMP_NUM_THREADS": "1"}
    rows = [{"text": f"Ticket {row}: my parcel {row * 7919} has not arrived."} for row in range(NUM_ROWS)]
    with ExitStack() as stack:
        client = stack.enter_context(Client(Settings.from_environment(env)))
        workers = [stack.enter_context(worker(env, folder / f"worker {number}")) for number in range(NUM_WORKERS)]
        job = client.submit(rows, MODEL, folder / "out", prompt="{text}", max_tokens=MAX_TOKENS, ignore_eos=True)
        wait_until(lambda: job.progress().rows_done > 0)
        (first,) = attempts(client, job)
        busy = next(each for each in workers if each.pid == WorkerId.parse(first.owner).pid)
        num_done = job.progress().rows_done
        busy.send_signal(signal.SIGKILL)
        killed = time.monotonic()
        taken = wait_until(lambda: len(attempts(client, job)) == 2)
        committed = wait_until(lambda: job.progress().rows_done > num_done)
        if job.wait(PATIENCE_SECONDS, start_worker=False).state is not JobState.COMPLETED:
            raise RuntimeError("the job has not completed")
        if job.results()["row"].to_pylist() != list(range(NUM_ROWS)):
            raise RuntimeError("not every row came out once")
    return taken - killed, committed - killed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--output", type=Path, help="where to write the JSON line as well")
    arguments = parser.parse_args()
    runs = []
    for number in range(arguments.runs):
        with tempfile.TemporaryDirectory() as folder:
            runs.append(recover(Path(folder)))
        print(f"run {number}: taken over after {runs[-1][0]:.2f} s, first commit after {runs[-1][1]:.2f} s", flush=True)
    taken, committed = zip(*runs, strict=True)
    figures = {"runs": len(runs), "seconds": spread(list(taken)), "seconds_to_first_commit": spread(list(committed))}
    print_result("recovery", figures, arguments.output)


if __name__ == "__main__":
    main()
