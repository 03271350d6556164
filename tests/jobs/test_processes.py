"""Children that end with their parent, however it ends."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from headrace.jobs.processes import is_alive

SCRIPT = Path(__file__).with_name("child.py")
WAYS = [pytest.param([], id="prctl", marks=pytest.mark.skipif(sys.platform != "linux", reason="Linux"))]
WAYS += [pytest.param(["portable"], id="portable")]
ENDS: dict[str, Callable[[subprocess.Popen[str]], None]] = {
    "SIGTERM": lambda parent: parent.terminate(),
    "SIGKILL": lambda parent: parent.kill(),
}


@pytest.mark.parametrize("options", WAYS)
@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_a_child_ends_with_its_parent(options, end, wait_until_ended):
    command = [sys.executable, SCRIPT, "parent", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        child = psutil.Process(int(parent.stdout.readline()))
        end(parent)
        parent.wait()
        wait_until_ended(child)


@pytest.mark.parametrize("options", WAYS)
def test_a_child_whose_parent_is_gone_already_ends_at_once(options):
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    command = [sys.executable, SCRIPT, "child", str(gone.pid), *options]
    done = subprocess.run(command, timeout=60, check=False, stdout=subprocess.DEVNULL)
    assert done.returncode == -signal.SIGTERM


def test_a_child_lives_as_long_as_its_parent():
    command: list[str | Path] = [sys.executable, SCRIPT, "child", str(os.getpid())]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert int(child.stdout.readline()) == child.pid
        assert child.poll() is None
        child.kill()


def test_a_process_is_alive_until_it_has_ended():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert is_alive(child.pid)
        child.kill()
        # Ended, and not yet waited for.
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert not is_alive(child.pid)
    assert not is_alive(child.pid)
