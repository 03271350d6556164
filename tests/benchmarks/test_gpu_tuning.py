"""The search for the attention kernels' shapes runs on a CPU too."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="the Triton kernels are for where it is installed")

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_tuning.py"


def dry_run(*arguments: str) -> Any:
    done = subprocess.run(
        [sys.executable, SCRIPT, "--dry-run", *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_dry_run_ranks_shapes_for_every_workload():
    result = dry_run()
    assert {name: len(ranked) for name, ranked in result["ranked"].items()} == {
        "decode, 2 of 100": 2,
        "prefill of 40": 1,
        "decode, 4 sharing 64": 2,
    }
    assert [(each["prefix"], each["start"]) for each in result["starts"]] == [(64, 0), (64, 192), (64, 2**20)]
    assert result["trials_left_out"] == 0


def test_what_there_was_no_time_for_is_left_out():
    result = dry_run("--seconds", "0")
    assert (result["ranked"], result["starts"], result["trials_left_out"]) == ({}, [], 6)
