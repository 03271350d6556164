"""The engine benchmark: what its workloads hold, what its gate stops, and what becomes of peers that fail."""

import importlib
import os
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ADAPTER = """
import sys, time
sys.path.insert(0, {peers!r})
from protocol import CannotRunError, serve

now = 0.0
time.perf_counter = lambda: now

def takes(seconds):
    global now
    now += seconds

def load(model, precision, max_model_len):
    print("libraries talk on stdout")
    return generate

def generate(prompts, max_tokens, shared):
    {body}

serve("1.0", dict(float32="f32", bfloat16="bf16"), load)
"""
# By a clock of the adapter's own, to which a busy machine adds nothing.
SEVENS = "takes(0.001); return [[7] * count for count in max_tokens]"


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


def test_no_workload_and_no_round_begins_as_another_does(script):
    """An engine would have computed what it is timed at; -1 is the first token's prompt, 1 the whole answer's."""
    rounds, recipes = script("rounds"), script("workloads").RECIPES
    plan = rounds.Plan("M1", [], {**recipes, "again": recipes["W1"]}, 1, 1.0)
    drawn = [plan.workload(name, number, 8) for name in plan.recipes for number in (-1, 0, 1, 2)]
    beginnings = [{tuple(prompt[:16]) for prompt in workload.prompts} for workload in drawn]
    assert len(set().union(*beginnings)) == sum(map(len, beginnings))


@pytest.mark.parametrize("name", ["W1", "W2", "W3", "W4", "W5", "W6"])
def test_a_cut_workload_keeps_its_prefixes(script, name):
    recipe = script("workloads").RECIPES[name]
    cut = recipe.cut(1000)
    prompts = cut.draw(3, 49152).prompts
    assert len(prompts) == cut.rows == min(recipe.rows, 8)


@pytest.fixture
def adapters(script, tmp_path, monkeypatch) -> Path:
    """An empty folder in place of the real adapters."""
    monkeypatch.setattr(script("processes"), "ADAPTERS", tmp_path)
    monkeypatch.setattr(script("processes"), "VENVS", tmp_path)
    monkeypatch.setattr(script("processes"), "LOGS", tmp_path)
    monkeypatch.setattr(script("shapes"), "FOLDER", tmp_path)
    return Path(tmp_path)


def write_adapter(folder: Path, engine: str, body: str = SEVENS) -> None:
    (folder / f"run_{engine}.py").write_text(ADAPTER.format(peers=str(BENCHMARKS / "peers"), body=body))


def contender(script, engine: str, precision: str = "float32"):
    return script("processes").Contender(engine, precision)


def test_the_gate_lets_equal_tokens_pass(script, adapters):
    for engine in ("headrace", "transformers"):
        write_adapter(adapters, engine)
    verdicts = script("gate").check_tokens([contender(script, "headrace", "bfloat16")], 60)
    assert verdicts == {
        "headrace float32": "passed: tokens of 24 of 24 rows are those of transformers in float32",
        "headrace bfloat16": "passed: first tokens of 24 of 24 rows are those of transformers in float32",
    }


def test_the_gate_ends_the_run_when_our_tokens_are_others(script, adapters):
    write_adapter(adapters, "headrace", "return [[7] * (count - 1) + [8] for count in max_tokens]")
    write_adapter(adapters, "transformers")
    with pytest.raises(SystemExit, match="no speed is worth printing"):
        script("gate").check_tokens([contender(script, "headrace")], 60)


def test_the_gate_tells_of_a_peer_with_other_tokens_and_goes_on(script, adapters):
    for engine in ("headrace", "transformers"):
        write_adapter(adapters, engine)
    write_adapter(adapters, "vllm", "return [[8] * count for count in max_tokens]")
    contenders = [contender(script, engine) for engine in ("headrace", "vllm")]
    verdicts = script("gate").check_tokens(contenders, 60)
    assert verdicts["vllm float32"] == "failed: tokens of 0 of 24 rows are those of transformers in float32"


def test_an_engine_that_ends_is_named_with_its_status_and_log(script, adapters):
    (adapters / "run_vllm.py").write_text("raise SystemExit('no such model')")
    processes = script("processes")
    folder = script("shapes").checkpoint("gate")
    with pytest.raises(processes.EngineFailure, match=r"vllm float32 ended with status 1: see .*vllm-float32\.log"):
        processes.EngineProcess(contender(script, "vllm"), folder, 256, 60)
    assert (adapters / "vllm-float32.log").read_text().strip() == "no such model"


def test_a_checkpoint_is_converted_once_and_anew_when_it_changes(script, adapters):
    count = adapters / "count"
    convert = f"import pathlib, sys; pathlib.Path(sys.argv[3]).mkdir(); open({str(count)!r}, 'a').write('x')"
    (adapters / "convert_openvino.py").write_text(convert)
    write_adapter(adapters, "openvino")
    folder, processes = script("shapes").checkpoint("gate"), script("processes")
    conversions = []
    for age in (0, 0, 10):
        changed = time.time() + age if age else (folder / "config.json").stat().st_mtime
        os.utime(folder / "model.safetensors", (changed, changed))
        with processes.EngineProcess(contender(script, "openvino"), folder, 256, 60):
            conversions.append(len(count.read_text()))
    assert conversions == [1, 1, 2]


@pytest.fixture
def measured(script, adapters):
    """Runs two rounds of a small workload: our engine and one peer that does as `body` says."""

    def run(body: str, timeout_seconds: float = 60):
        write_adapter(adapters, "headrace")
        write_adapter(adapters, "vllm", body)
        rounds, figures = script("rounds"), script("figures")
        recipes = {"W4": script("workloads").RECIPES["W4"]}
        contenders = [contender(script, engine) for engine in ("headrace", "vllm")]
        plan = rounds.Plan("gate", contenders, recipes, 2, timeout_seconds)
        found = figures.figures_of(plan, rounds.measure(plan), {})
        own, peer = found["contenders"]
        assert own["workloads"]["W4"]["rounds"] == 2
        return peer, "\n".join(figures.Table(found).lines())

    return run


def test_engines_take_turns_and_are_compared(measured):
    peer, table = measured(SEVENS)
    assert peer["workloads"]["W4"]["rounds"] == 2
    assert "as the fastest peer of float32, vllm float32" in table


def test_a_slow_peer_has_one_round(measured):
    peer, table = measured(f"takes(0.1); {SEVENS}")
    assert peer["workloads"]["W4"]["rounds"] == 1
    assert "(one round)" in table


def test_a_peer_that_cannot_run_a_workload_gets_a_footnote(measured):
    peer, table = measured("raise CannotRunError('too many rows')")
    assert peer["workloads"]["W4"] == {"cannot_run": "too many rows"}
    assert "– [1]" in table
    assert "[1] too many rows" in table


def test_a_peer_that_dies_is_reported_and_the_rest_go_on(measured):
    peer, table = measured("import os; os._exit(3)")
    assert "vllm float32 ended with status 3" in peer["failure"]
    assert "– [1]" in table


def test_a_peer_that_hangs_is_reported_and_the_rest_go_on(measured):
    peer, _ = measured("import signal; signal.pause()", timeout_seconds=5)
    assert "vllm float32 gave no answer in 5 s" in peer["failure"]


def test_a_peer_that_gives_too_few_tokens_is_reported(measured):
    peer, _ = measured("return [[7] for _ in max_tokens]")
    assert "did not generate as many tokens" in peer["failure"]
