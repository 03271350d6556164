"""A worker that is started again when it dies, and not when that would not help."""

import errno
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace.jobs.workers import kept_worker
from headrace.jobs.workers.kept_worker import KeptWorker

# Says how often it was started.
COUNT = 'echo start >> "$0.starts"; wc -l < "$0.starts"; '


@pytest.fixture
def told() -> dict[str, list[str]]:
    return {"lines": [], "refusals": []}


@pytest.fixture
def keep(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, told: dict[str, list[str]]
) -> Iterator[Callable[[str], KeptWorker]]:
    """Keeps a shell script in the worker's place alive."""
    workers: list[KeptWorker] = []

    def start(script: str) -> KeptWorker:
        path = tmp_path / "worker.sh"
        path.write_text(f"#!/bin/sh\n{COUNT}{script}\n")
        path.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(path))
        worker = KeptWorker("x", ["--model", "x"], told["lines"].append, told["refusals"].append)
        workers.append(worker)
        worker.start()
        return worker

    yield start
    for worker in workers:
        worker.stop()


def test_another_starts_after_growing_pauses(
    keep: Callable[[str], KeptWorker],
    told: dict[str, list[str]],
    wait_until: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(kept_worker, "_FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(kept_worker, "_LONGEST_PAUSE_SECONDS", 0.02)
    keep("exit 1")
    wait_until(lambda: told["lines"][:4] == ["1", "2", "3", "4"], "it was started four times")
    # Other tests' threads have their own to say.
    said = [record.getMessage() for record in caplog.records if record.name == kept_worker.__name__]
    pauses = [line.rpartition("another in ")[2] for line in said]
    assert pauses[:3] == ["0.01 s", "0.02 s", "0.02 s"]


def test_stop_ends_the_one_there_is(
    keep: Callable[[str], KeptWorker], told: dict[str, list[str]], wait_until: Callable[..., None]
) -> None:
    worker = keep("exec sleep 600")
    wait_until(lambda: told["lines"] == ["1"], "it runs")
    pid = worker.pid
    assert pid is not None
    # Ctrl-C in a terminal is for us alone: we stop it when it is its turn.
    assert os.getpgid(pid) != os.getpgid(0)
    worker.stop()
    assert worker.pid is None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    assert told["lines"] == ["1"]


@pytest.mark.parametrize("error", [BrokenPipeError, OSError(errno.ENOSPC, "No space left on device")])
def test_a_line_that_cannot_be_told_is_lost_and_not_the_worker(
    error: OSError | type[OSError],
    keep: Callable[[str], KeptWorker],
    told: dict[str, list[str]],
    wait_until: Callable[..., None],
) -> None:
    """As where a log's disk is full, or who read it is gone."""

    class FullLog(list[str]):
        def append(self, line: str) -> None:
            super().append(line)
            if len(self) == 2:
                raise error

    told["lines"] = FullLog()
    keep("echo lost; echo told; exec sleep 600")
    wait_until(lambda: len(told["lines"]) > 2, "it goes on")
    assert told["lines"] == ["1", "lost", "told"]


def test_one_that_refuses_is_not_started_again(
    keep: Callable[[str], KeptWorker], told: dict[str, list[str]], wait_until: Callable[..., None]
) -> None:
    worker = keep("echo 'headrace: no such model' >&2; exit 2")
    wait_until(lambda: bool(told["refusals"]), "it has refused")
    worker.stop()
    assert told == {"lines": ["1", "headrace: no such model"], "refusals": ["no such model"]}
