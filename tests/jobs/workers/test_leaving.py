"""A worker that is told to stop does not wait for a Redis that hangs."""

import signal
import subprocess
import sys
from pathlib import Path

import psutil
from redis import Redis

from headrace.jobs.embedded.valkey import EmbeddedValkey

SECONDS = 60.0
LEAVE = """
import sys, threading
from headrace.jobs.workers.leaving import Leaving
url, patience_seconds, busy = sys.argv[1], float(sys.argv[2]), sys.argv[3] == "busy"
looked_again, looks = threading.Event(), []
def is_busy():
    looks.append(None)
    if len(looks) > 1:
        looked_again.set()
    return busy
with Leaving(patience_seconds) as leaving:
    leaving.begin(url, is_busy)
    looked_again.wait(30)
sys.exit(7)
"""


def leave(url: str, patience_seconds: float, state: str = "idle") -> int:
    """The status of a process that leaves, 7 where it did so to its end."""
    command = [sys.executable, "-c", LEAVE, url, str(patience_seconds), state]
    return subprocess.run(command, timeout=SECONDS, check=False).returncode


def test_who_leaves_while_redis_hangs_does_not_wait_for_it(tmp_path: Path) -> None:
    with EmbeddedValkey(tmp_path) as valkey:
        with Redis.from_url(valkey.url) as redis:
            server = psutil.Process(redis.info("server")["process_id"])
        assert leave(valkey.url, 1.0) == 7
        server.send_signal(signal.SIGSTOP)
        try:
            assert leave(valkey.url, 0.05, "busy") == 7
            assert leave(valkey.url, 0.05) == 0
        finally:
            server.send_signal(signal.SIGCONT)
