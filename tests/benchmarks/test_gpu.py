"""The GPU's benchmark runs from end to end on a CPU, where nothing is installed that a bare GPU machine lacks."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="the Triton kernels are for where it is installed")

FOLDER = Path(__file__).parents[2] / "benchmarks"
# In place of a machine without them: what else the project depends on, and the project as it is installed here.
BARE = """
import runpy, sys
class Missing:
    names = {"celery", "kombu", "redis", "pydantic", "sqlalchemy", "alembic", "pyarrow", "fastapi", "starlette",
             "uvicorn", "httpx2", "openai", "transformers", "llguidance", "typer", "rich", "grpc", "prometheus_client"}
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] in cls.names:
            raise ModuleNotFoundError(f"{name} is not installed on a bare GPU machine", name=name)
sys.meta_path.insert(0, Missing)
sys.meta_path[:] = [each for each in sys.meta_path if "headrace" not in getattr(each, "__module__", "")]
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_dry_run_on_a_bare_machine_has_every_goal_or_says_why_not(tmp_path):
    script = [FOLDER / "gpu.py", "--dry-run", "--no-peers", "--output", tmp_path / "result.json"]
    # Not in the project's folder, and without git.
    done = subprocess.run(
        [sys.executable, "-c", BARE, *script],
        cwd=tmp_path,
        env={"PYTHONPATH": str(FOLDER), "PATH": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result == json.loads((tmp_path / "result.json").read_text())
    assert result["gpu"] == "none (dry run)"
    assert result["commit"] == "unknown"
    assert [line.partition(":")[0] for line in result["not_run"]] == [
        "FlashInfer",
        "goal 6, transformers, shared prompt, 10 times as fast",
        "goal 6, transformers, uniform lengths, 2 times as fast",
        "goal 6, vllm, shared prompt, 10 times as fast",
        "goal 6, vllm, uniform lengths, 2 times as fast",
    ]
    measured = [line["number"] for line in result["lines"] if line["goal"] is not None and line["ratio"] is not None]
    assert {number: measured.count(number) for number in measured} == {1: 2, 2: 1, 3: 2, 4: 4, 5: 3, 7: 1}
    assert all(line["value"] >= 0 for line in result["lines"])


@pytest.fixture
def gpu_modules(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(FOLDER)
    from importlib import import_module

    return import_module


def test_the_ceilings_are_those_that_the_goals_were_set_by(gpu_modules):
    """Output tokens and labels a second on an H200, worked out by hand before there was a line of code."""
    limits = gpu_modules("gpu_kernels").Limits(4.3e12, 790e12)
    configs, least_seconds = gpu_modules("gpu_engine").CONFIGS, gpu_modules("gpu_ceilings").least_seconds
    for model, tokens, labels in (("llama-3-8b", 22_700, 384), ("M2", 339_000, 6_360)):
        assert 256 * 128 / least_seconds(configs[model], 256, 2048, 128, 128, limits) == pytest.approx(tokens, rel=0.01)
        assert 1024 / least_seconds(configs[model], 1024, 2048, 128, 8, limits) == pytest.approx(labels, rel=0.01)


def test_idle_time_is_what_no_interval_covers(gpu_modules):
    idle_share = gpu_modules("gpu_steps").idle_share
    intervals = [(0.0, 10.0), (2.0, 4.0), (12.0, 20.0), (60.0, 100.0)]
    assert idle_share(intervals, 0.0) == pytest.approx(0.42)
    assert idle_share(intervals, 5.0) == pytest.approx(0.40)


def test_a_workload_to_warm_up_with_has_the_same_lengths_and_no_token_in_common(gpu_modules):
    workload = gpu_modules("gpu_engine").Workload
    for work in (workload.shared("gate", 4, 9, 3, 2), workload.uniform("gate", 5, 2, 30)):
        other = work.with_other_tokens()
        assert [len(prompt) for prompt in other.prompts] == [len(prompt) for prompt in work.prompts]
        assert other.max_tokens == work.max_tokens
        pairs = [
            pair for prompts in zip(work.prompts, other.prompts, strict=True) for pair in zip(*prompts, strict=True)
        ]
        assert all(mine != others >= 0 for mine, others in pairs)
