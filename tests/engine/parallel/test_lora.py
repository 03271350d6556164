"""Processes that share a model hold their parts of LoRA adapters, and answer as one that has all of it."""

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace import LoRARequest
from headrace.engine.checkpoints.model_config import ModelConfig
from headrace.engine.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.errors import InvalidRequestError, ModelError
from headrace.engine.lora.adapter import Adapter
from headrace.engine.lora.installed import InstalledAdapters
from headrace.engine.parallel import rank_processes
from headrace.engine.parallel.parallel_runner import ParallelRunner
from headrace.engine.request import FinishReason, Request

from ..lora.adapters import ATTENTION, LINEAR_ATTENTION, MLP, save_adapter
from ..running import greedy_params, run_all, token_ids
from .sharing import saved_logits, started_as_thread
from .small_models import write_model

PROMPT = [token % 300 for token in range(7, 880, 11)]
WAYS = {
    "tensor": {"tensor_parallel_size": 2},
    "pipeline": {"pipeline_parallel_size": 2},
    "both": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
}
# By what is peculiar to each: one head of keys for two ranks, biases, fused matrices, experts in one layer, and states,
# with inputs and gates of heads that lie together on disk.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"num_key_value_heads": 1},
    "llama-bias-tied": {},
    "phi3": {},
    "qwen2-moe": {"mlp_only_layers": [0, 2]},
    "qwen3-next": {"num_hidden_layers": 4, "mlp_only_layers": [0, 1, 2, 3]},
    "qwen3.5": {"num_hidden_layers": 4},
}
_MIXED = {"qwen3-next": ("in_proj_qkvz", "in_proj_ba", "out_proj"), "qwen3.5": LINEAR_ATTENTION}
_FUSED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of models with three layers, each with adapters: in all its projections, in few, in attention alone."""
    made = {}
    for name, fields in FAMILIES.items():
        folder = made[name] = write_model(
            tmp_path_factory.mktemp("adapted") / name, name, **{"num_hidden_layers": 3, "dtype": "float32", **fields}
        )
        saved_logits(ModelConfig.from_pretrained(folder))
        targets = _FUSED if name == "phi3" else ATTENTION + (() if name == "qwen2-moe" else MLP) + _MIXED.get(name, ())
        save_adapter(folder, folder / "all", targets=targets, seed=1)
        save_adapter(folder, folder / "few", targets=(targets[0], "o_proj"), rank=3, seed=2)
        save_adapter(folder, folder / "attention", targets=("o_proj",), rank=16, alpha=64, seed=3)
    return made


@pytest.fixture(autouse=True)
def _ranks_are_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_processes, "_started", started_as_thread)


def lora(folder: Path, name: str | None) -> LoRARequest | None:
    return None if name is None else LoRARequest(name, 1, str(folder / name))


def load(folder: Path, **options: Any) -> Engine:
    known = {"num_gpu_blocks_override": 60, "block_size": 8, "max_model_len": 120, "num_threads": 1, **options}
    return Engine.from_pretrained(folder, EngineConfig(enable_lora=True, **known))


def requests(folder: Path, prefix: str = "") -> list[Request]:
    """Prompts of two lengths with every adapter and with none, those of one prompt after each other."""
    return [
        Request(f"{prefix}{name}/{length}", PROMPT[:length], greedy_params(8), lora_request=lora(folder, name))
        for length in (9, 70)
        for name in ("all", "few", "attention", None)
    ]


def answers(engine: Engine, asked: list[Request]) -> dict[str, list[int]]:
    return {request_id: token_ids(events) for request_id, events in run_all(engine, asked).items()}


@pytest.fixture(params=WAYS)
def shared(folders: dict[str, Path], request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine = load(folders["qwen2"], max_loras=2, **WAYS[request.param])
    yield engine
    engine.close()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_all_adapters_in_one_batch(folders, family, way):
    folder = folders[family]
    expected = answers(load(folder), requests(folder))
    # Each adapter says something of its own, or a mistaken one would pass.
    assert len({str(answer) for answer in expected.values()}) == len(expected)
    # The first step has so many tokens that stages compute parts of it at the same time.
    engine = load(folder, lora_modules=[lora(folder, "few")], **WAYS[way])
    assert answers(engine, requests(folder)) == expected
    # From the cache of prefixes; no state is kept of prompts that nobody shares.
    before = engine.stats.num_computed_tokens
    assert answers(engine, requests(folder)) == expected
    assert engine.stats.num_computed_tokens - before < before or family in _MIXED
    engine.close()


def test_guesses_and_chunks(folders):
    folder = folders["qwen2"]
    guessing = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "disable_by_batch_size": 64}
    options: dict[str, Any] = {"speculative_config": guessing, "max_num_batched_tokens": 13}
    engine = load(folder, **options, **WAYS["both"])
    assert answers(engine, requests(folder)) == answers(load(folder), requests(folder))
    assert engine.stats.num_draft_tokens > 0
    engine.close()


def test_one_makes_place_for_another(folders, shared):
    """As many are held as have room, by all processes: a third waits, one that was sent away is read again."""
    folder = folders["qwen2"]
    expected = answers(load(folder), requests(folder))
    assert answers(shared, requests(folder)) == expected
    assert answers(shared, requests(folder)[::-1]) == expected
    runner = shared._runner
    assert isinstance(runner, ParallelRunner)
    assert len(runner._shares._own.known) == 2


def test_what_cannot_be_read_harms_only_its_requests(folders, shared, tmp_path):
    folder = folders["qwen2"]
    shutil.copytree(folder / "all", tmp_path / "broken")
    (tmp_path / "broken" / "adapter_model.safetensors").write_bytes(b"nothing")
    with pytest.raises(InvalidRequestError, match="broken"):
        shared.add(Request("broken", PROMPT, greedy_params(2), lora_request=lora(tmp_path, "broken")))
    assert answers(shared, requests(folder)) == answers(load(folder), requests(folder))


def test_named_ones_that_cannot_be_read_end_the_start(folders, tmp_path):
    """Of another model; also where this process has none of the layers that it does not fit."""
    folder = folders["qwen2"]
    larger = write_model(tmp_path / "larger", num_hidden_layers=3, intermediate_size=192)
    saved_logits(ModelConfig.from_pretrained(larger))
    save_adapter(larger, larger / "other", targets=("down_proj",))
    with pytest.raises(ModelError, match=r"layers\.0\.mlp\.down_proj.* has shape \(4, 192\).* \(4, 128\)"):
        load(folder, lora_modules=[lora(larger, "other")], **WAYS["both"])


def test_one_without_memory_for_its_part_refuses_for_all(folders, shared, monkeypatch):
    """And those that are held stay."""
    folder = folders["qwen2"]
    asked = requests(folder)
    expected = answers(load(folder), asked)
    first = [request for request in asked if request.lora_request is None or "all" in request.lora_request.lora_path]
    assert answers(shared, first) == {request.request_id: expected[request.request_id] for request in first}
    install, runner = InstalledAdapters.install, shared._runner
    assert isinstance(runner, ParallelRunner)

    def install_if_small(installed: InstalledAdapters, held: Sequence[Adapter]) -> None:
        if installed is not runner.adapters and any(adapter.rank == 16 for adapter in held):
            raise torch.OutOfMemoryError
        install(installed, held)

    with monkeypatch.context() as patched:
        patched.setattr(InstalledAdapters, "install", install_if_small)
        with pytest.raises(InvalidRequestError, match="does not fit"):
            shared.add(Request("large", PROMPT, greedy_params(2), lora_request=lora(folder, "attention")))
        assert answers(shared, first) == {request.request_id: expected[request.request_id] for request in first}
    assert answers(shared, asked) == expected


def test_a_row_whose_adapter_had_to_wait_and_is_gone_by_then_ends_alone(folders, shared, tmp_path):
    asked = requests(folders["qwen2"])
    shutil.copytree(folders["qwen2"] / "attention", gone := tmp_path / "gone")
    for request in asked[:2]:
        shared.add(request)
    shared.add(Request("gone", PROMPT, greedy_params(2), lora_request=LoRARequest("gone", 1, str(gone))))
    shutil.rmtree(gone)
    events = {event.request_id: event for _ in iter(lambda: shared.has_work, False) for event in shared.step()}
    assert events["gone"].finish_reason is FinishReason.ERROR
    assert all(events[request.request_id].finish_reason is FinishReason.LENGTH for request in asked[:2])
