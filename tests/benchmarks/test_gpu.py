"""The GPU's benchmark runs from end to end on a CPU, and says that it did."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the Triton kernels are for where it is installed")

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


def test_a_dry_run_ends_in_a_line_of_json_with_every_goal(tmp_path):
    command = [sys.executable, SCRIPT, "--dry-run", "--no-peers", "--output", tmp_path / "result.json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result == json.loads((tmp_path / "result.json").read_text())
    assert result["gpu"] == "none (dry run)"
    assert result["not_run"] == [
        "FlashInfer: it is not installed here, or not asked for",
        "goal 6, transformers: not asked for",
        "goal 6, vllm: not asked for",
    ]
    goals = {line["number"] for line in result["lines"] if line["goal"] is not None or line["limit"] is not None}
    assert {1, 2, 3, 4, 5, 7} <= goals
    assert all(line["value"] >= 0 for line in result["lines"])
