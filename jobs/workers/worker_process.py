"""A worker as a child process."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import IO

# How long a worker may take to hand back what it has not finished.
STOP_SECONDS = 15.0
# The exit status of one that can not run as it is told to: starting it again does not help.
REFUSED = 2
# That of one that has come no further for too long, and ended itself.
HUNG = 3


def start_worker(
    options: Sequence[str],
    output: int | IO[bytes],
    *,
    environment: Mapping[str, str] | None = None,
    in_own_group: bool = False,
) -> "subprocess.Popen[bytes]":
    """Start `headrace worker` with these options; its messages go to `output`.

    It ends by itself when the calling thread does. `environment`: its own, in the place of this process's.
    `in_own_group`: Ctrl-C does not reach it.
    """
    # -P: without it Python would look for our modules in the working directory first.
    command = [sys.executable, "-P", "-m", "headrace.jobs.cli", "worker", *options, "--parent-pid", str(os.getpid())]
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=in_own_group,
    )


def stop_workers(processes: "Sequence[subprocess.Popen[bytes]]") -> None:
    """Have them hand back what they have not finished, and end; kills those that take too long."""
    for process in processes:
        # Nothing where it has ended.
        process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + STOP_SECONDS
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
