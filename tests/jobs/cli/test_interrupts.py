"""How a command that runs for long is told to stop."""

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import os, signal, sys
from headrace.jobs.cli.interrupts import termination_as_interrupt
# Whoever runs the tests may have it ignored.
signal.signal(signal.SIGHUP, signal.SIG_IGN if sys.argv[2] == "ignored" else signal.SIG_DFL)
before = signal.getsignal(signal.SIGHUP)
try:
    with termination_as_interrupt():
        try:
            os.kill(os.getpid(), int(sys.argv[1]))
            print("went on")
        finally:
            # Told again while it ends.
            os.kill(os.getpid(), int(sys.argv[1]))
            print("ended")
except KeyboardInterrupt:
    print("stopped")
assert signal.getsignal(signal.SIGHUP) == before
"""


@pytest.mark.parametrize(
    ("signum", "hangups", "said"),
    [
        (signal.SIGTERM, "heard", "ended\nstopped\n"),
        (signal.SIGHUP, "heard", "ended\nstopped\n"),
        # As `nohup` has it.
        (signal.SIGHUP, "ignored", "went on\nended\n"),
        (signal.SIGTERM, "ignored", "ended\nstopped\n"),
    ],
)
def test_a_closed_terminal_and_a_termination_stop_it_as_ctrl_c_does(signum, hangups, said):
    command = [sys.executable, "-c", PROGRAM, str(int(signum)), hangups]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == (said, "")
