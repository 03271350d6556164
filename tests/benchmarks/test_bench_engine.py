"""The engine benchmark: what its workloads hold, and that its gate stops engines that answer differently."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ADAPTER = """
import sys
sys.path.insert(0, {peers!r})
from protocol import serve

def load(model, dtype, max_model_len):
    print("libraries talk on stdout")
    return lambda prompts, max_tokens, shared: [[{token}] * count for count in max_tokens]

serve("1.0", load)
"""


@pytest.fixture
def script(monkeypatch):
    """Imports a benchmark script by its bare name, as the scripts import one another."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    yield load
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(BENCHMARKS)):
            del sys.modules[name]


@pytest.mark.parametrize(
    ("name", "rows", "distinct", "output"),
    [
        ("W1", 128, 512 + 128 * 32, 128 * 8),
        ("W3", 64, 2048 + 64 * 64, 64 * 16),
        ("W4", 1, 128, 64),
        ("W5", 256, 8 * 512 + 256 * 32, 256 * 8),
        ("W6", 128, 256 + 8 * 256 + 128 * 16, 128 * 8),
    ],
)
def test_workloads_share_what_they_say(script, name, rows, distinct, output):
    recipe = script("workloads").RECIPES[name]
    workload = recipe.draw(3, 49152, recipe.rows)
    assert (workload.rows, workload.distinct_prompt_tokens(), workload.output_tokens) == (rows, distinct, output)


def test_workloads_of_uniform_lengths_share_nothing(script):
    workload = script("workloads").RECIPES["W2"].draw(3, 49152, 64)
    assert workload.distinct_prompt_tokens() == sum(map(len, workload.prompts))
    assert {20 <= len(prompt) <= 200 for prompt in workload.prompts} == {True}
    assert {20 <= count <= 100 for count in workload.max_tokens} == {True}


def test_a_workload_is_the_seeds_alone(script):
    recipe = script("workloads").RECIPES["W5"]
    assert recipe.draw(1, 300, 16) == recipe.draw(1, 300, 16) != recipe.draw(2, 300, 16)


@pytest.fixture
def adapters(script, tmp_path, monkeypatch) -> Path:
    """An empty folder in place of the real adapters."""
    monkeypatch.setattr(script("processes"), "ADAPTERS", tmp_path)
    monkeypatch.setattr(script("processes"), "LOGS", tmp_path)
    monkeypatch.setattr(script("shapes"), "FOLDER", tmp_path)
    return Path(tmp_path)


def write_adapter(folder: Path, engine: str, token: int) -> None:
    (folder / f"run_{engine}.py").write_text(ADAPTER.format(peers=str(BENCHMARKS / "peers"), token=token))


def test_the_gate_lets_equal_tokens_pass(script, adapters, capsys):
    for engine in ("headrace", "transformers"):
        write_adapter(adapters, engine, 7)
    script("bench_engine").check_tokens(["headrace", "transformers"])
    assert "the same in headrace, transformers" in capsys.readouterr().out


def test_the_gate_stops_other_tokens(script, adapters):
    write_adapter(adapters, "headrace", 7)
    write_adapter(adapters, "transformers", 8)
    with pytest.raises(SystemExit, match=r"transformers and headrace differ in rows \[0, 1, .*no speed is worth"):
        script("bench_engine").check_tokens(["headrace", "transformers"])


def test_an_engine_that_dies_is_named_with_its_log(script, adapters):
    (adapters / "run_headrace.py").write_text("raise SystemExit('no such model')")
    failure = script("processes").EngineFailure
    with pytest.raises(failure, match=r"headrace ended: see .*headrace\.log"):
        script("bench_engine").check_tokens(["headrace"])
    assert (adapters / "headrace.log").read_text().strip() == "no such model"
