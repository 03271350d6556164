"""A worker that hangs ends itself, and another one does its rows; one that only takes its time does not."""

import os
import re
import signal
import time
from collections.abc import Callable, Hashable
from pathlib import Path

import psutil
import pytest

from headrace.engine.errors import ConfigError
from headrace.jobs.cli.options import watchdog_seconds
from headrace.jobs.workers.watchdog import Look, Suspicion, Watchdog

from ..running import MODEL, environment, processes_of, results, started

SECONDS = 120.0
# Read by every Python that starts in this environment: a worker that comes first to a place waits for a file there.
PATCH = """
import os
import sys
import time

if "worker" in sys.orig_argv:
    from {module} import {cls}

    method = {cls}.{method}
    calls = 0

    def hang_once(self, *arguments):
        global calls
        calls += 1
        if calls == {call}:
            try:
                os.close(os.open("{hangs}", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                pass
            else:
                while not os.path.exists("{goes_on}"):
                    {wait}
        return method(self, *arguments)

    {cls}.{method} = hang_once
"""
STEP = {"module": "headrace.engine.execution.model_runner", "cls": "ModelRunner", "method": "execute", "call": "20"}
LOAD = {"module": "headrace.engine.execution.model_runner", "cls": "ModelRunner", "method": "__init__", "call": "1"}
COMMIT = {"module": "headrace.jobs.shards.part_writer", "cls": "PartWriter", "method": "commit", "call": "1"}


class Hanging:
    """A job of twelve rows whose first worker hangs. `hangs`: a file that is there as soon as it does."""

    def __init__(self, folder: Path, rows: Path) -> None:
        self._folder = folder
        self.data_dir, self.output = folder / "data", folder / "out"
        self.hangs, self.goes_on = folder / "hangs", folder / "goes on"
        options = ["--prompt", "{text}", "--max-tokens", "24", "--ignore-eos", "--output", str(self.output)]
        self.arguments = ["run", str(rows), "--model", str(MODEL), *options]

    def environment(self, place: dict[str, str] = STEP, wait: str = "time.sleep(0.01)") -> dict[str, str]:
        patch = self._folder / "patch"
        patch.mkdir()
        (patch / "sitecustomize.py").write_text(
            PATCH.format(hangs=self.hangs, goes_on=self.goes_on, wait=wait, **place)
        )
        return environment(self.data_dir, PYTHONPATH=f"{patch}{os.pathsep}{os.environ['PYTHONPATH']}")

    @property
    def log(self) -> str:
        return "".join(path.read_text() for path in (self.data_dir / "logs").glob("worker-*.log"))

    def worker(self) -> psutil.Process:
        (worker,) = [each for each in processes_of(self.data_dir) if "worker" in each.cmdline()]
        return worker

    def assert_complete(self) -> None:
        table = results(self.output)
        assert table["row"].to_pylist() == list(range(12))
        assert set(table["error"].to_pylist()) == {None}


@pytest.fixture
def hanging(tmp_path: Path, few: Path) -> Hanging:
    return Hanging(tmp_path, few)


def test_a_job_whose_worker_hangs_in_a_step_is_completed_by_another(hanging: Hanging, tmp_path: Path) -> None:
    arguments = [*hanging.arguments, "--watchdog-timeout", "2"]
    with started(arguments, hanging.environment(), tmp_path / "run") as run:
        assert run.wait(SECONDS) == 0, hanging.log
    hanging.assert_complete()
    assert re.search(r"the engine, at step \d+ with \d+ sequences running and \d+ waiting, has not got on", hanging.log)
    assert "Thread engine (most recent call last):" in hanging.log
    assert "in hang_once" in hanging.log
    assert "Thread lease renewal" in hanging.log


@pytest.mark.parametrize(
    ("place", "words"),
    [(LOAD, "loading the model"), (COMMIT, r"attempt 1 at shard job_\w+/00000")],
    ids=["while it starts", "beside the engine"],
)
def test_one_that_hangs_elsewhere_has_twelve_times_as_long(
    hanging: Hanging, tmp_path: Path, place: dict[str, str], words: str
) -> None:
    """Its lease was renewed by another thread, or the run waited for it to begin."""
    arguments = [*hanging.arguments, "--watchdog-timeout", "1"]
    with started(arguments, hanging.environment(place), tmp_path / "run") as run:
        assert run.wait(SECONDS) == 0, hanging.log
    hanging.assert_complete()
    assert re.search(rf"{words} has not got on for \d+ s: this worker ends", hanging.log)
    assert "in hang_once" in hanging.log


def test_one_that_holds_the_interpreter_is_ended_too(hanging: Hanging, tmp_path: Path) -> None:
    """No thread of it runs any more: it cannot end itself."""
    arguments = [*hanging.arguments, "--watchdog-timeout", "2"]
    hold = "__import__('ctypes').PyDLL(None).pause()"
    with started(arguments, hanging.environment(wait=hold), tmp_path / "run") as run:
        assert run.wait(SECONDS) == 0, hanging.log
    hanging.assert_complete()
    # Whether its first steps were behind it by the last time that it ran some.
    assert re.search("headrace worker: this worker has run no Python for (2|24) s and ends;", hanging.log)
    assert "in hang_once" in hanging.log


def test_a_worker_that_was_stopped_for_longer_than_that_goes_on(
    hanging: Hanging, tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    arguments = [*hanging.arguments, "--watchdog-timeout", "4"]
    with started(arguments, hanging.environment(), tmp_path / "run") as run:
        wait_until(lambda: hanging.hangs.exists() or run.poll() is not None, "it is in a step")
        worker = hanging.worker()
        worker.send_signal(signal.SIGSTOP)
        wait_until(lambda: worker.status() == psutil.STATUS_STOPPED, "it stands still")
        begin = time.monotonic()
        wait_until(lambda: time.monotonic() > begin + 6, "it stood still for longer than a step may take")
        worker.send_signal(signal.SIGCONT)
        hanging.goes_on.touch()
        assert run.wait(SECONDS) == 0, hanging.log
    hanging.assert_complete()
    assert hanging.log.count("serving") == 1
    assert "watchdog" not in hanging.log


def test_a_rank_that_stands_still_ends_its_worker_and_another_completes_the_job(
    hanging: Hanging, tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    """It has not died, so that nobody hears of it: the others wait for what it was to compute."""
    arguments = [*hanging.arguments, "-tp", "2", "--max-model-len", "512", "--watchdog-timeout", "2"]
    env = {**hanging.environment(), "OMP_NUM_THREADS": "1"}
    with started(arguments, env, tmp_path / "run") as run:
        wait_until(lambda: hanging.hangs.exists() or run.poll() is not None, "it is in a step")
        (rank,) = [
            each for each in hanging.worker().children() if any("rank_process" in word for word in each.cmdline())
        ]
        rank.suspend()
        hanging.goes_on.touch()
        assert run.wait(SECONDS) == 0, hanging.log
    hanging.assert_complete()
    assert f"rank 1 is process {rank.pid}" in hanging.log


def test_a_guard_that_is_stopped_keeps_no_worker_from_ending(wait_until: Callable[..., None]) -> None:
    """As by Ctrl-Z, which stops all of a terminal's processes, of which somebody wakes but the worker."""
    with Watchdog(300):
        guards = [each for each in psutil.Process().children() if any("guard.py" in word for word in each.cmdline())]
        (guard,) = guards
        guard.suspend()
        wait_until(lambda: guard.status() == psutil.STATUS_STOPPED, "it stands still")
    assert not guard.is_running()


def look(place: Hashable, may_take_long: bool = False, cpu_seconds: float = 0.0) -> Look:
    return Look(place, may_take_long, cpu_seconds)


def beats_until(seconds: float, looks: Callable[[int], Look]) -> int:
    suspicion, beat = Suspicion(1.0), 0
    suspicion.note(looks(beat))
    while suspicion.suspected_seconds < seconds - 1e-6:
        beat += 1
        suspicion.note(looks(beat))
    return beat


def test_what_gets_on_and_what_rests_is_never_suspected() -> None:
    suspicion = Suspicion(1.0)
    for beat in range(1000):
        suspicion.note(look(beat // 3))
        assert suspicion.still_seconds < 3
    for _ in range(1000):
        suspicion.note(look(None))
    assert suspicion.still_seconds == suspicion.suspected_seconds == 0


def test_what_may_be_work_has_twelve_times_as_long() -> None:
    assert beats_until(10, lambda beat: look("x")) == 10
    assert beats_until(10, lambda beat: look("x", may_take_long=True)) == 120
    assert beats_until(10, lambda beat: look("x", cpu_seconds=beat / 2)) == 120
    assert beats_until(10, lambda beat: look("x", may_take_long=True, cpu_seconds=beat / 2)) == 1440
    # A processor's share that a thread takes which wakes now and then to look around.
    assert beats_until(10, lambda beat: look("x", cpu_seconds=beat / 1000)) == 10


@pytest.mark.parametrize("seconds", [0, 1, 300])
def test_the_option(seconds: float) -> None:
    assert watchdog_seconds(seconds) == seconds


@pytest.mark.parametrize("seconds", [-1, 0.5, float("nan"), float("inf")])
def test_the_option_is_refused(seconds: float) -> None:
    with pytest.raises(ConfigError, match="--watchdog-timeout must be 0, which turns it off, or from 1 to"):
        watchdog_seconds(seconds)
