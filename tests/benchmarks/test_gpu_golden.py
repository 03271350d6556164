"""What a GPU's tokens are compared with: which differences are let pass, and that all happens that is to be tried."""

import json
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the Triton kernels are for where it is installed")

from headrace.engine.llm import LLM
from headrace.engine.logprobs import Logprob
from headrace.engine.offline.outputs import CompletionOutput, RequestOutput
from headrace.kernels.paged_attention import planning

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def golden(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.syspath_prepend(FOLDER)
    # Dry runs write the same checkpoints beside it.
    monkeypatch.setattr(import_module("gpu_engine"), "ROOT", tmp_path)
    return import_module("gpu_golden")


def output(*tokens: int, logprobs: list[dict[int, float]] | None = None) -> RequestOutput:
    reported = None
    if logprobs is not None:
        reported = [{token: Logprob(value, 1) for token, value in each.items()} for each in logprobs]
    return RequestOutput("r", None, [1], [CompletionOutput(0, "", tokens, "length", logprobs=reported)], 0)


def test_answers_may_part_where_two_logits_are_near(golden):
    expected = [output(5, 6, 7, logprobs=[{5: -1.0, 3: -2.0}, {6: -1.0, 4: -1.00005}, {7: -1.0, 2: -2.0}])]
    assert golden.places_of_ties([output(5, 6, 7)], expected) == []
    # What follows is of another text.
    assert golden.places_of_ties([output(5, 4, 9)], expected) == ["token 1 of prompt 0"]


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (output(3, 6), "token 0 of prompt 0 is 3, and on the CPU 5, whose lead is 1"),
        (output(5, 9), "token 1 of prompt 0 is 9, and on the CPU 6"),
        (
            output(5, 6, logprobs=[{5: -1.0}, {6: -1.01}]),
            "token 1 of prompt 0 has a log-probability that is off by 0.01",
        ),
    ],
    ids=["not near", "neither of the two", "log-probability"],
)
def test_other_differences_are_wrong(golden, found, said):
    expected = [output(5, 6, logprobs=[{5: -1.0, 3: -2.0}, {6: -1.0, 4: -1.00005}])]
    with pytest.raises(AssertionError, match=said):
        golden.places_of_ties([found], expected)


def test_every_model_is_preempted_and_found_in_the_cache(golden):
    """On a CPU it is the same schedule: no minute on a GPU is lost to a check that has too much room."""
    gate = planning.MIN_SHARED_TOKENS
    checks = golden.golden_checks(torch.device("cpu"), is_dry=False)
    # A dry run has those.
    for name in checks.keys() - golden.golden_checks(torch.device("cpu"), is_dry=True).keys():
        assert checks[name]() == "", name
    assert gate is planning.MIN_SHARED_TOKENS


def test_a_window_that_is_one_too_wide_is_found(golden, monkeypatch):
    right, config, opened = golden.open_model, golden.CONFIGS["golden windows"], list[str]()

    def second_is_wrong(folder: Path, device: str, **options: Any) -> LLM:
        if opened:
            (folder / "config.json").write_text(json.dumps({**config, "sliding_window": config["sliding_window"] + 1}))
        opened.append(device)
        return right(folder, device, **options)

    monkeypatch.setattr(golden, "open_model", second_is_wrong)
    with pytest.raises(AssertionError, match="of prompt 0 is "):
        golden.check_golden("golden windows", torch.device("cpu"))


def test_a_check_that_fails_ends_no_other_and_all_are_told(golden, capsys):
    def fail() -> str:
        raise RuntimeError("out of\nmemory")

    checks = {"one": fail, "two": lambda: "near", "three": fail}
    with pytest.raises(AssertionError, match="one: RuntimeError: out of memory; three: RuntimeError"):
        import_module("gpu_parts")._check_each("golden", checks)
    assert capsys.readouterr().out.splitlines() == [
        "NOT golden: one: RuntimeError: out of memory",
        "golden: two (near)",
        "NOT golden: three: RuntimeError: out of memory",
    ]
