"""The search for the attention kernels' shapes runs on a CPU too."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the Triton kernels are for where it is installed")

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_tuning.py"


def test_a_dry_run_ranks_shapes_for_every_workload():
    done = subprocess.run([sys.executable, SCRIPT, "--dry-run"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert {name: len(ranked) for name, ranked in result["ranked"].items()} == {
        "decode, 2 of 100": 2,
        "prefill of 40": 1,
        "decode, 4 sharing 64": 2,
    }
    assert result["trials_left_out"] == 0
