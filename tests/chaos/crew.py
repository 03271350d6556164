"""The process that keeps the workers alive, and a test that fails at once when it ends by itself."""

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import IO

from ..jobs.running import ROOT

_STOP_SECONDS = 120.0
_TAIL_LINES = 40


class CrewEnded(AssertionError):
    """It has ended without being told to."""


@contextmanager
def running_crew(arguments: Sequence[str], env: Mapping[str, str], stdout: int, log: Path) -> Iterator[None]:
    """`python -m` these arguments, told to end at the end; its stderr goes to `log`.

    Raises `CrewEnded` in the midst of whatever the main thread does when it ends before.
    """
    command = [sys.executable, "-m", *arguments]
    # Not written by itself: a worker whose files may not grow could not say what it dies of.
    crew = subprocess.Popen(command, cwd=ROOT, env=env, stdout=stdout, stderr=subprocess.PIPE)
    assert crew.stderr is not None
    told = threading.Event()
    writer = threading.Thread(target=_copy, args=(crew.stderr, log))
    watcher = threading.Thread(target=_watch, args=(crew, told))

    def fail(signum: int, frame: FrameType | None) -> None:
        lines = log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
        raise CrewEnded("\n".join([f"the workers ended by themselves, with status {crew.returncode}:", *lines]))

    former = signal.signal(signal.SIGUSR1, fail)
    writer.start()
    watcher.start()
    try:
        yield
    finally:
        told.set()
        crew.terminate()
        status = crew.wait(_STOP_SECONDS)
        watcher.join()
        writer.join()
        signal.signal(signal.SIGUSR1, former)
    assert status == 0, f"{status}: {log.read_text(errors='replace')}"


def _copy(stderr: IO[bytes], log: Path) -> None:
    with log.open("wb", buffering=0) as file:
        for line in stderr:
            file.write(line)


def _watch(crew: "subprocess.Popen[bytes]", told: threading.Event) -> None:
    crew.wait()
    if not told.is_set():
        # To this very thread, whose sleeps and waits are cut short by it.
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
