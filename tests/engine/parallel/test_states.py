"""Processes that share a model whose layers have states answer as one that has it alone, however states are used."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from headrace.engine.checkpoints.model_config import ModelConfig
from headrace.engine.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.parallel import rank_processes
from headrace.engine.request import FinishReason, Request
from headrace.engine.sampling_params import SamplingParams

from ..running import greedy_params, run_all, token_ids
from .sharing import saved_logits, started_as_thread
from .small_models import WITH_STATES, write_model

WAYS = {
    "tensor": {"tensor_parallel_size": 2},
    "pipeline": {"pipeline_parallel_size": 2},
    "both": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
}
BROKEN = 300
SHARED = [(7 * place * place + 3) % BROKEN for place in range(75)]
OWN = [[(place * place + 11 * nth) % BROKEN for place in range(5 + 9 * nth)] for nth in range(5)]
DRAWN = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
OPTIONS: dict[str, Any] = {"num_gpu_blocks_override": 100, "block_size": 8, "max_model_len": 160, "num_threads": 1}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: write_model(tmp_path_factory.mktemp("states") / name, name) for name in WITH_STATES}
    for folder in made.values():
        saved_logits(ModelConfig.from_pretrained(folder))
    return made


@pytest.fixture(autouse=True)
def _ranks_are_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_processes, "_started", started_as_thread)


def load(folder: Path, **options: Any) -> Engine:
    return Engine.from_pretrained(folder, EngineConfig(**{**OPTIONS, **options}))


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> dict[str, int]:
    return WAYS[request.param]


@pytest.fixture
def pair(folders: dict[str, Path], way: dict[str, int]) -> Iterator[Engine]:
    engine = load(folders["qwen3.5"], **way)
    yield engine
    engine.close()


def requests(max_tokens: int = 24) -> list[Request]:
    return [Request(f"{nth}", SHARED + own, greedy_params(max_tokens)) for nth, own in enumerate(OWN)]


def answers(engine: Engine, asked: list[Request]) -> dict[str, list[int]]:
    return {request_id: token_ids(events) for request_id, events in run_all(engine, asked).items()}


# Each model is shared in both ways at once, and Qwen3.5 in each by itself too.
@pytest.mark.parametrize(
    ("name", "way"), [*((name, "both") for name in WITH_STATES), ("qwen3.5", "tensor"), ("qwen3.5", "pipeline")]
)
def test_a_shared_prompt_is_computed_once(folders, name, way):
    alone, shared = load(folders[name]), load(folders[name], **WAYS[way])
    expected = run_all(alone, requests())
    found = run_all(shared, requests())
    shared.close()
    assert {key: token_ids(each) for key, each in found.items()} == {
        key: token_ids(each) for key, each in expected.items()
    }
    # Each says something of its own, and not one thing over and over, or a mistaken state would pass.
    assert len({str(token_ids(each)) for each in found.values()}) == len(OWN)
    assert all(len(set(token_ids(each))) > 8 for each in found.values())
    assert [each[-1].num_cached_tokens for each in found.values()] == [0, 72, 72, 72, 72]


@pytest.mark.parametrize(
    "options",
    [
        {"num_gpu_blocks_override": 26, "max_num_batched_tokens": 29},
        {"async_scheduling": True, "max_num_batched_tokens": 200},
        {"enable_prefix_caching": False},
    ],
    ids=["chunked-and-preempted", "one-step-ahead", "no-prefix-cache"],
)
def test_however_the_work_is_scheduled(folders, way, options):
    """Some steps are so long that stages compute parts of them, which cut sequences."""
    alone, shared = load(folders["qwen3-next"], **options), load(folders["qwen3-next"], **options, **way)
    assert answers(shared, requests()) == answers(alone, requests())
    if "num_gpu_blocks_override" in options:
        assert shared.stats.num_preemptions > 0
    # With what the first ones left.
    assert answers(shared, requests(8)[::-1]) == answers(alone, requests(8)[::-1])
    shared.close()


def test_samples_and_choices_go_on_from_the_state_of_their_prompt(folders, pair):
    alone = load(folders["qwen3.5"])
    params = [replace(DRAWN, seed=seed) for seed in range(4)]
    samples = [Request(str(seed), SHARED, each, fork_of="0" if seed else None) for seed, each in enumerate(params)]
    assert answers(pair, samples) == answers(alone, samples)
    choices = ((5, 6, 7), (5, 6, 8), (5, 9), (11, 12))
    asked = [Request("chosen", SHARED, SamplingParams(temperature=0, choices=["a", "b", "c", "d"]), choices)]
    found, expected = (run_all(engine, asked)["chosen"][-1].choice_probabilities for engine in (pair, alone))
    assert found == pytest.approx(expected, rel=1e-4)


def test_a_row_that_fails_ends_alone(folders, tmp_path, way):
    """The others' states, which the failed step has changed, are made again."""
    folder = shutil.copytree(folders["qwen3.5"], tmp_path / "broken")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][BROKEN] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    pair, expected = load(folder, **way), answers(load(folder), requests())
    broken = Request("broken", [*SHARED[:20], BROKEN, *SHARED[:9]], greedy_params(4))
    events = run_all(pair, [*requests(), broken])
    assert events.pop("broken")[-1].finish_reason is FinishReason.ERROR
    assert {key: token_ids(each) for key, each in events.items()} == expected
    assert answers(pair, requests()) == expected
    pair.close()
