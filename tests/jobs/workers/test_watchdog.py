"""A worker that hangs ends itself, and another one does its rows; one that only takes its time does not."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Hashable
from pathlib import Path
from subprocess import PIPE

import psutil
import pytest

from headrace.engine.errors import ConfigError
from headrace.jobs.cli.options import watchdog_seconds
from headrace.jobs.workers.watchdog import Look, Suspicion, Watchdog
from headrace.jobs.workers.worker_process import HUNG

from ..running import MODEL, environment, processes_of, results, started

SECONDS = 120.0
# Read by every Python that starts in this environment: the first worker hangs in the first place, the next in the next.
PATCH = """
import os
import sys
import time
from importlib import import_module

def hanging(method, at_call, hangs):
    calls = 0

    def hang_once(self, *arguments):
        nonlocal calls
        calls += 1
        if calls == at_call:
            os.close(os.open(hangs, os.O_CREAT | os.O_EXCL))
            while not os.path.exists("{goes_on}"):
                time.sleep(0.01)
        return method(self, *arguments)

    return hang_once

if "worker" in sys.orig_argv:
    for module, cls, name, at_call in {places}:
        if not os.path.exists(hangs := "{hangs}" + name):
            kind = getattr(import_module(module), cls)
            setattr(kind, name, hanging(getattr(kind, name), at_call, hangs))
            break
"""
STEP = ("headrace.engine.execution.model_runner", "ModelRunner", "execute", 20)
COMMIT = ("headrace.jobs.shards.part_writer", "PartWriter", "commit", 1)
# A process with a watchdog and nothing else of a worker. It says when it has come to what it does.
CHILD = """
import ctypes, faulthandler, os, sys, time
from headrace.jobs.workers.watchdog import ENGINE, Loading, Look, Watchdog

# As a worker has it.
faulthandler.enable(2)

class Step(Loading):
    def look(self):
        return Look("a step", may_take_long=False)

with Watchdog({seconds}) as watchdog:
    {begin}
    print("begun", flush=True)
    {go_on}
"""


class Hanging:
    """A job of twelve rows whose first workers hang."""

    def __init__(self, folder: Path, rows: Path) -> None:
        self._folder = folder
        self.data_dir, self.output = folder / "data", folder / "out"
        self._hangs, self.goes_on = folder / "hangs at ", folder / "goes on"
        options = ["--prompt", "{text}", "--max-tokens", "24", "--ignore-eos", "--output", str(self.output)]
        self.arguments = ["run", str(rows), "--model", str(MODEL), *options]

    def environment(self, *places: tuple[str, str, str, int]) -> dict[str, str]:
        patch = self._folder / "patch"
        patch.mkdir()
        code = PATCH.format(places=places, hangs=self._hangs, goes_on=self.goes_on)
        (patch / "sitecustomize.py").write_text(code)
        return environment(self.data_dir, PYTHONPATH=f"{patch}{os.pathsep}{os.environ['PYTHONPATH']}")

    def does_hang(self) -> bool:
        return any(self._folder.glob(f"{self._hangs.name}*"))

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


def test_a_job_whose_workers_hang_is_completed_by_another(hanging: Hanging, tmp_path: Path) -> None:
    """One in a step, the next one beside the engine, where another thread has renewed its lease."""
    arguments = [*hanging.arguments, "--watchdog-timeout", "1"]
    with started(arguments, hanging.environment(STEP, COMMIT), tmp_path / "run") as run:
        assert run.wait(SECONDS) == 0, hanging.log
    hanging.assert_complete()
    assert re.search(r"the engine, at step \d+ with \d+ sequences running and \d+ waiting, has not got on", hanging.log)
    assert re.search(r"attempt \d at shard job_\w+/00000 has not got on for \d+ s: this worker ends", hanging.log)
    # On a busy machine one that does not hang may be slower than that as well.
    assert hanging.log.count("Thread engine (most recent call last):") >= 2
    assert hanging.log.count("in hang_once") == 2
    assert "Thread lease renewal" in hanging.log


def child(seconds: float, begin: str = "pass", go_on: str = "time.sleep(60)") -> "subprocess.Popen[str]":
    code = CHILD.format(seconds=seconds, begin=begin, go_on=go_on)
    process = subprocess.Popen([sys.executable, "-c", code], stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    return process


IN_A_STEP = "watchdog.watch(lambda: {ENGINE: Step()})"


def test_loading_has_twelve_times_as_long() -> None:
    begin = time.monotonic()
    with child(0.5) as hung:
        _, told = hung.communicate(timeout=SECONDS)
    assert hung.returncode == HUNG
    assert time.monotonic() - begin > 0.5 * 11
    assert re.search(r"loading the model has not got on for \d s: this worker ends", told)


def test_one_that_holds_the_interpreter_is_ended_too() -> None:
    """No thread of it runs any more: it cannot end itself."""
    with child(1, IN_A_STEP, "time.sleep(0.3); ctypes.PyDLL(None).pause()") as hung:
        _, told = hung.communicate(timeout=SECONDS)
    assert hung.returncode == -signal.SIGABRT
    assert "headrace worker: this worker has run no Python for 1 s and ends;" in told
    assert 'File "<string>", line' in told


def test_one_that_was_stopped_for_longer_than_that_goes_on(wait_until: Callable[..., None]) -> None:
    with child(1, IN_A_STEP, "sys.stdin.read(1); os._exit(0)") as stopped:
        stopped.send_signal(signal.SIGSTOP)
        wait_until(lambda: psutil.Process(stopped.pid).status() == psutil.STATUS_STOPPED, "it stands still")
        begin = time.monotonic()
        wait_until(lambda: time.monotonic() > begin + 3, "it stood still for longer than a step may take")
        stopped.send_signal(signal.SIGCONT)
        _, told = stopped.communicate("x", timeout=SECONDS)
    assert (stopped.returncode, told) == (0, "")


def test_a_rank_that_stands_still_ends_its_worker_and_another_completes_the_job(
    hanging: Hanging, tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    """It has not died, so that nobody hears of it: the others wait for what it was to compute."""
    arguments = [*hanging.arguments, "-tp", "2", "--max-model-len", "512", "--watchdog-timeout", "2"]
    env = {**hanging.environment(STEP), "OMP_NUM_THREADS": "1"}
    with started(arguments, env, tmp_path / "run") as run:
        wait_until(lambda: hanging.does_hang() or run.poll() is not None, "it is in a step")
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
