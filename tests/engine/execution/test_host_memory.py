"""Steps that ask for the same memory again do not get it from the system again."""

import os
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys, torch
from headrace.engine.execution.host_memory import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        # Several at a time, as a layer holds: what is freed then is more than glibc keeps by itself.
        held = [torch.empty(20 * 1024**2, dtype=torch.uint8).fill_(1) for _ in range(5)]
        del held
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(faults())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs glibc")
def test_freed_memory_is_kept():
    def faults(how: str) -> int:
        # glibc learns how much to keep; whether it trims is luck then. From this threshold on it hands back at once.
        env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(128 * 1024)}
        done = subprocess.run([sys.executable, "-c", FAULTS, how], env=env, capture_output=True, text=True, check=True)
        return int(done.stdout)

    assert faults("keep") < faults("as it is") / 50
