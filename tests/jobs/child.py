"""Run by the tests: dies with its parent, after saying its pid. As `parent`, starts such a child and waits."""

import os
import signal
import subprocess
import sys
import threading

from headrace.jobs import processes


def be_child(parent_pid: int, portable: bool) -> None:
    if portable:
        processes._libc = None
    processes.die_with_parent(parent_pid, signal.SIGTERM)
    print(os.getpid(), flush=True)
    threading.Event().wait()


def be_parent(*options: str) -> None:
    with subprocess.Popen([sys.executable, __file__, "child", str(os.getpid()), *options]) as child:
        child.wait()


if sys.argv[1] == "parent":
    be_parent(*sys.argv[2:])
else:
    be_child(int(sys.argv[2]), "portable" in sys.argv)
