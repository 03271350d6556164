"""Run beside a worker: ends it where it runs no Python any more, so that its own watchdog cannot.

    python -I -S guard.py PID SECONDS BEAT_SECONDS

The watchdog writes a byte to our standard input every BEAT_SECONDS: one that says how many times SECONDS it may be
silent from then on. Nothing of ours is imported: it takes ten milliseconds to start, and 10 MB.
"""

import os
import select
import signal
import sys
from contextlib import suppress
from pathlib import Path

# How long it may take to write its tracebacks.
_DYING_SECONDS = 10.0


def main(pid: int, seconds: float, beat_seconds: float) -> None:
    """Until the worker is gone."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    leniency, silent_seconds = 1, 0.0
    while silent_seconds < leniency * seconds:
        if select.select([0], [], [], beat_seconds)[0]:
            if not (beats := os.read(0, 4096)):
                return
            leniency, silent_seconds = beats[-1], 0.0
        elif not _is_stopped(pid):
            silent_seconds += beat_seconds
    _end(pid, silent_seconds)


def _is_stopped(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] in ("T", "t")


def _end(pid: int, silent_seconds: float) -> None:
    words = (
        f"this worker has run no Python for {silent_seconds:.0f} s and ends; its rows are tried again by the next one"
    )
    # Python's fault handler, which needs no interpreter, says what all threads are at. Whatever takes the log may hang.
    signal.signal(signal.SIGALRM, lambda *_: os.kill(pid, signal.SIGKILL))
    signal.setitimer(signal.ITIMER_REAL, _DYING_SECONDS)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGABRT)
        while os.read(0, 4096):
            pass
        print(f"headrace worker: {words}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]))
