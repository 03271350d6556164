"""A worker as a child process."""

import os
import signal
import subprocess
import sys
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


def stop_worker(process: "subprocess.Popen[bytes]") -> None:
    """Have it hand back what it has not finished, and end; kills it when that takes too long."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
