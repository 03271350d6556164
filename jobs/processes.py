"""Processes that do not outlive the one that started them."""

import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_POLL_SECONDS = 0.5

# Loaded once, here: the call itself may be made between fork and exec, where importing could deadlock.
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def die_with_parent(parent_pid: int, signum: signal.Signals = signal.SIGTERM) -> None:
    """Have this process sent `signum` when its parent ends, however that happens.

    Called by the child at its start, with the pid its parent told it. When the parent is gone already,
    the signal is sent at once. On Linux the kernel does it, when the *thread* that started us ends: start
    children from a thread that lives as long as they should. Elsewhere a thread polls.
    """
    if not set_parent_death_signal(signum):
        threading.Thread(target=_poll_parent, args=(parent_pid, signum), daemon=True).start()
    elif os.getppid() != parent_pid:
        os.kill(os.getpid(), signum)


def set_parent_death_signal(signum: signal.Signals) -> bool:
    """Ask the kernel to send this process `signum` when its parent ends; False where it cannot.

    Survives exec, not fork, and may be called between the two. Does not notice a parent that ended before.
    """
    if _libc is None:
        return False
    if _libc.prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0) != 0:
        error_number = ctypes.get_errno()
        raise OSError(error_number, f"prctl(PR_SET_PDEATHSIG): {os.strerror(error_number)}")
    return True


def is_alive(pid: int) -> bool:
    """Whether a process of this host runs; one that has ended does not, even if nobody has asked for its status yet."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return not _is_zombie(pid)


def _is_zombie(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    # The state stands behind the command's name, which is in brackets and may hold anything.
    return status.rpartition(")")[2].split()[0] == "Z"


def _poll_parent(parent_pid: int, signum: signal.Signals) -> None:
    while os.getppid() == parent_pid:
        time.sleep(_POLL_SECONDS)
    os.kill(os.getpid(), signum)


def num_cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
