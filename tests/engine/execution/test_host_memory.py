"""Steps that ask for the same memory again do not get it from the system again."""

import os
import subprocess
import sys

import pytest

FAULTS = """
import resource, torch
from headrace.engine.execution.host_memory import keep_freed_memory
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        # Several at a time, as a layer holds: what is freed then is more than glibc keeps by itself.
        held = [torch.empty(20 * 1024**2, dtype=torch.uint8).fill_(1) for _ in range(5)]
        del held
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(faults())
keep_freed_memory()
faults()
print(faults())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs glibc")
def test_freed_memory_is_kept():
    # glibc learns how much to keep; whether it trims is luck then. From this threshold on it hands back at once.
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(128 * 1024)}
    done = subprocess.run([sys.executable, "-c", FAULTS], env=env, capture_output=True, text=True, check=True)
    as_it_is, kept = map(int, done.stdout.split())
    assert kept < as_it_is / 50


GIVEN_BACK = """
import resource, torch
from headrace.engine.execution.host_memory import give_back_freed_memory, keep_freed_memory
def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
keep_freed_memory()
held = [torch.empty(2**20, dtype=torch.uint8).fill_(1) for _ in range(200)]
most = resident_bytes()
del held
kept = resident_bytes()
give_back_freed_memory()
print(most - kept, kept - resident_bytes())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs glibc")
def test_until_it_is_given_back():
    done = subprocess.run([sys.executable, "-c", GIVEN_BACK], capture_output=True, text=True, check=True)
    at_once, given_back = map(int, done.stdout.split())
    assert at_once < 20 * 2**20
    assert given_back > 150 * 2**20
