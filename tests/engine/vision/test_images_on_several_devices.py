"""Processes that share a model that reads images answer as transformers does: each sees what its layers need."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace import LoRARequest
from headrace.engine.checkpoints.model_size import num_parameters
from headrace.engine.parallel import rank_processes
from headrace.engine.sharding.stages import own_model
from headrace.engine.vision.prompt_images import Piece, PromptImage

from ..lora.adapters import ATTENTION, save_adapter
from ..parallel.sharing import started_as_thread
from ..running import run_all, token_ids
from .seeing import (
    Gemma4Oracle,
    GemmaOracle,
    MistralOracle,
    Oracle,
    png,
    save_gemma3,
    save_gemma4,
    save_mistral3,
    save_qwen3_5,
    save_qwen3_vl,
    save_seeing_model,
)
from .test_images_in_prompts import CAT, DOG, PROMPTS, answers, new_engine

WAYS = {
    "tensor": {"tensor_parallel_size": 2},
    "pipeline": {"pipeline_parallel_size": 2},
    "both": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
}


def save_mixture(folder: Path) -> Any:
    experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
    return save_qwen3_vl(folder, **experts)


def save_with_states(folder: Path) -> Any:
    """Of both kinds of layers each stage has one."""
    return save_qwen3_5(folder, layer_types=["linear_attention", "full_attention"] * 2)


def save_large_gemma4(folder: Path) -> Any:
    """Only its layers with windows see all of an image."""
    return save_gemma4(folder, {}, hidden_size_per_layer_input=0, use_bidirectional_attention="vision")


# Gates and ups of the first one's tower have the names of a decoder's.
MODELS: dict[str, Callable[[Path], Any]] = {
    "qwen2.5-vl": save_seeing_model,
    "qwen3-vl": save_qwen3_vl,
    "qwen3-vl-moe": save_mixture,
    "qwen3.5": save_with_states,
    "mistral3": save_mistral3,
    # In a pipeline its images are where parts of a step would be cut.
    "gemma3": save_gemma3,
    "gemma4": save_large_gemma4,
}
ORACLES = {"mistral3": MistralOracle, "gemma3": GemmaOracle, "gemma4": Gemma4Oracle}
SCHEDULES: dict[str, dict[str, Any]] = {
    "together": {},
    "chunked": {"max_num_batched_tokens": 13},
    "async": {"async_scheduling": True, "max_num_batched_tokens": 150},
}
# Each model goes each way and has each schedule, and each way has each schedule.
PAIRED = [
    (model, way, list(SCHEDULES)[(place + shift) % len(SCHEDULES)])
    for shift, model in enumerate(MODELS)
    for place, way in enumerate(WAYS)
]
# What goes wrong, or is added, beside these: each model and each way, but not each with each.
MIXED = [(model, list(WAYS)[shift % len(WAYS)]) for shift, model in enumerate(MODELS)]


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    folder = tmp_path_factory.mktemp("shared") / request.param
    return ORACLES.get(request.param, Oracle)(folder, MODELS[request.param](folder))


@pytest.fixture(scope="module")
def expected(model: Oracle) -> dict[str, list[int]]:
    return {name: model.answer(model.request(name, *parts), *parts) for name, parts in PROMPTS.items()}


@pytest.fixture(autouse=True)
def _ranks_are_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_processes, "_started", started_as_thread)


@pytest.mark.parametrize(("model", "way", "schedule"), PAIRED, indirect=["model"])
def test_all_prompts(model, expected, way, schedule):
    engine = new_engine(model, num_threads=1, **SCHEDULES[schedule], **WAYS[way])
    assert answers(engine, [model.request(name, *parts) for name, parts in PROMPTS.items()]) == expected
    # With what is cached, of images too.
    again = "two", "at the end"
    found = answers(engine, [model.request(name, *PROMPTS[name]) for name in again])
    assert found == {name: expected[name] for name in again}
    engine.close()


def test_a_tower_that_speaks_to_layers_of_two_stages(tmp_path):
    model = Oracle(tmp_path, save_qwen3_vl(tmp_path))
    engine = new_engine(model, pipeline_parallel_size=3, num_threads=1)
    for name, parts in PROMPTS.items():
        request = model.request(name, *parts)
        assert answers(engine, [request])[name] == model.answer(request, *parts)
    engine.close()


@pytest.mark.parametrize(("model", "way"), MIXED, indirect=["model"])
def test_a_broken_image_fails_alone(model, expected, way):
    broken = PromptImage.of(png(DOG)[:-2000], model.vision)
    bad = replace(model.request("bad", *PROMPTS["at the end"]), images=[broken])
    engine = new_engine(model, max_num_batched_tokens=30, num_threads=1, **WAYS[way])
    events = run_all(engine, [bad, *(model.request(name, *parts) for name, parts in PROMPTS.items())])
    engine.close()
    assert "image 1 of the prompt is no image that can be read" in (events["bad"][-1].error or "")
    assert {name: token_ids(events[name]) for name in PROMPTS} == expected


@pytest.mark.parametrize(("model", "way"), MIXED, indirect=["model"])
def test_adapters(model, way, tmp_path):
    lora = LoRARequest("kind", 1, str(save_adapter(model.folder, tmp_path / "kind", targets=ATTENTION)))
    alone = new_engine(model, enable_lora=True, num_threads=1)
    shared = new_engine(model, enable_lora=True, num_threads=1, **WAYS[way])
    asked = [model.request(name, *parts) for name, parts in PROMPTS.items()]
    asked += [replace(each, request_id=f"adapted {each.request_id}", lora_request=lora) for each in asked]
    expected = answers(alone, asked)
    assert answers(shared, asked) == expected
    assert expected["two"] != expected["adapted two"]
    shared.close()


def test_a_stage_that_sees_nothing_has_no_tower(tmp_path):
    """Of four layers with a tower that speaks to two, the first of four stages have one, and the first of two."""
    config = Oracle(tmp_path, save_qwen3_vl(tmp_path, num_hidden_layers=4)).config
    assert [own_model(config, stage, 4, 0, 1).vision is not None for stage in range(4)] == [True, True, False, False]
    stages = [own_model(config, stage, 2, 0, 1) for stage in range(2)]
    assert [each.vision is not None for each in stages] == [True, False]
    assert sum(map(num_parameters, stages)) == num_parameters(config)


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        (0, 30, (3, 2, 9)),
        (0, 10, (3, 2, 9)),
        (0, 9, (3, 2, 8)),
        (3, 10, (0, 2, 9)),
        (4, 5, (0, 3, 4)),
        (0, 3, None),
        (10, 12, None),
    ],
)
def test_what_of_an_image_stands_in_a_part_of_a_step(start, end, expected, model):
    image = model.request("", DOG, CAT).images[0]
    found = Piece(3, image, 2, 9).between(start, end)
    assert found == (None if expected is None else (expected[0], image, *expected[1:]))
