"""Whole runs that are killed, interrupted and robbed of their parts, and that end as if nothing had happened."""

import os
import shlex
import signal
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import psutil
import pyarrow.dataset as ds
import pytest

from headrace.jobs.client.client import Client
from headrace.jobs.open_ledger import open_ledger
from headrace.jobs.processes import num_cores
from headrace.jobs.settings import Settings
from headrace.jobs.workers.presence import WorkerId
from headrace.storage.ledger.records import JobState

from ..duck import read_by_duckdb
from .conftest import wait_until
from .running import LABELS, MODEL, ROOT, environment, label_arguments, processes_of, started, write_tickets

SECONDS = 120.0
ROWS = 128


@pytest.fixture(scope="module")
def undisturbed(served, tickets, tmp_path_factory) -> list[str]:
    """The labels of a run that nothing happened to."""
    with Client(Settings.from_environment(environment(served))) as client:
        job = client.submit(
            tickets,
            MODEL,
            tmp_path_factory.mktemp("undisturbed") / "out",
            prompt="{text}",
            system=(ROOT / "examples/tickets/system.txt").read_text().strip(),
            choices=LABELS,
            limit=ROWS,
        )
        assert job.wait(SECONDS, start_worker=False).state is JobState.COMPLETED
        labels: list[str] = job.results()["label"].to_pylist()
    return labels


class Runs:
    """Runs of the tickets into one output folder and with a data folder of their own."""

    def __init__(self, stack: ExitStack, tickets: Path, folder: Path) -> None:
        self._stack = stack
        self._folder = folder
        self._count = 0
        self.data_dir = folder / "data"
        self.output = folder / "out"
        self.arguments = [*label_arguments(tickets, self.output), "--limit", str(ROWS)]

    def start(self, *more: str, output: Path | None = None) -> "Run":
        self._count += 1
        folder = self._folder / f"run {self._count}"
        arguments = [*self.arguments, *more, *(["--output", str(output)] if output else [])]
        process = self._stack.enter_context(started(arguments, environment(self.data_dir), folder))
        return Run(process, folder)

    def parts(self) -> dict[str, int]:
        """The published parts with the times of their last change."""
        return {path.name: path.stat().st_mtime_ns for path in self.output.glob("*.parquet")}

    def hold_after(self, num_parts: int) -> None:
        """Have the ledger fail whoever commits another part, who then tries again: until `let_go` no run completes."""
        with open_ledger(Settings.from_environment(environment(self.data_dir))):
            pass
        held = f"(SELECT count(*) FROM parts) >= {num_parts}"
        self._execute(f"CREATE TRIGGER hold BEFORE INSERT ON parts WHEN {held} BEGIN SELECT json('no JSON'); END")

    def let_go(self) -> None:
        self._execute("DROP TRIGGER hold")

    def _execute(self, statement: str) -> None:
        with closing(sqlite3.connect(self.data_dir / "headrace.db", timeout=60, isolation_level=None)) as ledger:
            ledger.execute(statement)

    def wait_for_parts(self, count: int) -> None:
        wait_until(lambda: self._committed()[0] >= count, f"{count} parts are committed", SECONDS)

    def rows_committed(self) -> int:
        return self._committed()[1]

    def _committed(self) -> tuple[int, int]:
        """How many parts there are by the ledger, and how many rows."""
        with closing(sqlite3.connect(self.data_dir / "headrace.db", timeout=60)) as ledger:
            (sums,) = ledger.execute("SELECT count(*), coalesce(sum(num_rows), 0) FROM parts").fetchall()
        return sums[0], sums[1]

    def committers(self) -> set[int]:
        """The pids of the workers that have committed parts."""
        query = "SELECT DISTINCT owner FROM parts JOIN attempts ON attempts.id = attempt_id"
        with closing(sqlite3.connect(self.data_dir / "headrace.db", timeout=60)) as ledger:
            return {WorkerId.parse(owner).pid for (owner,) in ledger.execute(query)}

    def workers(self) -> set[int]:
        """The pids of those there are."""
        return {each.pid for each in processes_of(self.data_dir) if _has_words(each, ("headrace.jobs.cli worker ",))}

    def process(self, *words: str) -> psutil.Process:
        """The one process of these runs whose command line has all these words."""
        found = [process for process in processes_of(self.data_dir) if _has_words(process, words)]
        assert len(found) == 1, found
        return found[0]

    def wait_until_nothing_is_left(self) -> None:
        wait_until(lambda: not processes_of(self.data_dir), f"no process of {self.data_dir} is left", SECONDS)

    def assert_complete(self, labels: list[str], output: Path | None = None) -> None:
        output = output or self.output
        table = ds.dataset(sorted(map(str, output.glob("*.parquet")))).to_table().sort_by("row")
        assert table["row"].to_pylist() == list(range(ROWS))
        assert table["label"].to_pylist() == labels
        assert set(table["error"].to_pylist()) == {None}
        assert not list(output.glob(".part*")), "an unpublished part is left"


class Run:
    def __init__(self, process: "subprocess.Popen[bytes]", folder: Path) -> None:
        self.process = process
        self._folder = folder

    @property
    def out(self) -> str:
        return (self._folder / "out").read_text()

    @property
    def err(self) -> str:
        return (self._folder / "err").read_text()

    def signal_group(self, signum: signal.Signals) -> None:
        os.killpg(self.process.pid, signum)

    def wait(self) -> int:
        return self.process.wait(SECONDS)

    def assert_succeeded(self) -> None:
        assert self.wait() == 0, self.err
        assert "Traceback" not in self.err


def _has_words(process: psutil.Process, words: tuple[str, ...]) -> bool:
    try:
        line = " ".join(process.cmdline())
    except psutil.Error:
        return False
    return all(word in line for word in words)


@pytest.fixture
def runs(tickets, tmp_path) -> Iterator[Runs]:
    with ExitStack() as stack:
        runs = Runs(stack, tickets, tmp_path)
        yield runs
    runs.wait_until_nothing_is_left()


def kept_and_generated(run: Run) -> tuple[int, int]:
    line = next(line for line in run.out.splitlines() if line.startswith("rows "))
    words = line.split()
    return int(words[words.index("kept") - 1]), int(words[words.index("generated,") - 1])


def test_a_run_killed_halfway_is_resumed_without_doing_anything_twice(runs, undisturbed):
    runs.hold_after(3)
    first = runs.start()
    runs.wait_for_parts(3)
    first.signal_group(signal.SIGKILL)
    first.wait()
    runs.wait_until_nothing_is_left()
    runs.let_go()
    before, committed = runs.parts(), runs.rows_committed()
    second = runs.start("--resume")
    second.assert_succeeded()
    runs.assert_complete(undisturbed)
    assert runs.parts().items() >= before.items()
    kept, generated = kept_and_generated(second)
    assert kept + generated == ROWS
    assert 0 < kept < ROWS
    assert kept == committed
    assert label_counts_by_duckdb(runs.output) == {label: undisturbed.count(label) for label in set(undisturbed)}


def label_counts_by_duckdb(folder: Path) -> dict[str, int]:
    query = f"select label, count(*), avg(confidence) from '{folder}/*.parquet' group by 1"
    rows = read_by_duckdb(query)
    assert all(0 < confidence <= 1 for _, _, confidence in rows)
    return {label: count for label, count, _ in rows}


def test_a_run_whose_valkey_is_killed_finishes_by_itself(runs, undisturbed):
    runs.hold_after(1)
    run = runs.start()
    runs.wait_for_parts(1)
    runs.process("valkey-server").kill()
    runs.let_go()
    run.assert_succeeded()
    runs.assert_complete(undisturbed)
    assert kept_and_generated(run) == (0, ROWS)


@pytest.mark.skipif(num_cores() < 2, reason="a worker has a core at least")
def test_a_run_one_of_whose_workers_is_killed_finishes_by_itself(runs, undisturbed):
    runs.hold_after(1)
    run = runs.start("--data-parallel-size", "2")
    runs.wait_for_parts(1)
    before, (killed,) = runs.workers(), runs.committers()
    assert len(before) == 2
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: len(runs.workers() - before) == 1, "another is there in its place", SECONDS)
    # The other one did not notice.
    assert runs.workers() > before - {killed}
    runs.let_go()
    run.assert_succeeded()
    runs.assert_complete(undisturbed)
    assert kept_and_generated(run) == (0, ROWS)
    assert len(runs.committers()) > 1


def test_an_interrupted_run_says_how_to_go_on_and_that_goes_on(runs, undisturbed):
    runs.hold_after(1)
    run = runs.start()
    runs.wait_for_parts(1)
    run.signal_group(signal.SIGINT)
    assert run.wait() == 130
    runs.wait_until_nothing_is_left()
    runs.let_go()
    before, committed = runs.parts(), runs.rows_committed()
    assert "Traceback" not in run.err
    assert f" of {ROWS} rows are committed (headrace cancel job_" in run.err
    assert shlex.split(run.err.splitlines()[-1]) == ["headrace", *runs.arguments, "--resume"]
    run = runs.start("--resume")
    run.assert_succeeded()
    runs.assert_complete(undisturbed)
    assert runs.parts().items() >= before.items()
    assert kept_and_generated(run)[0] == committed


def test_two_runs_share_a_data_folder(runs, undisturbed, tmp_path):
    other = tmp_path / "other"
    both = [runs.start(), runs.start(output=other)]
    for run in both:
        run.assert_succeeded()
    runs.assert_complete(undisturbed)
    runs.assert_complete(undisturbed, other)


def test_a_run_told_to_end_while_planning_says_how_to_go_on(tmp_path, tickets):
    many = tmp_path / "many.jsonl"
    many.write_text(tickets.read_text() * 60)
    output = tmp_path / "out"
    arguments = label_arguments(many, output)
    with started(arguments, environment(tmp_path / "data"), tmp_path / "run") as process:
        wait_until((output / "_headrace.json").exists, "the job has begun", SECONDS)
        process.terminate()
        assert process.wait(SECONDS) == 130
    err = (tmp_path / "run/err").read_text()
    assert "Traceback" not in err
    assert shlex.split(err.splitlines()[-1]) == ["headrace", *arguments, "--resume"]
    wait_until(lambda: not processes_of(tmp_path / "data"), "nothing is left", SECONDS)


def test_a_worker_started_first_serves_runs_and_leaves_nothing_behind(tmp_path):
    """On a machine where nothing of ours has run yet, as in the README: a worker on all cores here, a run there."""
    data, cores = tmp_path / "data", str(os.cpu_count() or 1)
    tickets = write_tickets(tmp_path / "tickets.jsonl", 40)
    env = environment(data, OMP_NUM_THREADS=cores)
    with started(["worker", "--model", str(MODEL)], env, tmp_path / "worker") as worker:
        log = tmp_path / "worker/err"
        wait_until(lambda: "serving" in log.read_text(), "the worker serves", SECONDS)
        with started(label_arguments(tickets, tmp_path / "out"), environment(data), tmp_path / "run") as run:
            assert run.wait(SECONDS) == 0
        worker.terminate()
        assert worker.wait(60) == 0
    assert log.read_text().count("is done, its job") == 2
    wait_until(lambda: not processes_of(data), "all processes have ended", SECONDS)
