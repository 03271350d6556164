"""How much memory the KV cache gets: the arithmetic, and the step that is measured. The GPU itself is not at hand."""

import json
from pathlib import Path

import pytest
import torch

from headrace.engine.checkpoints.model_config import ModelConfig
from headrace.engine.config import EngineConfig
from headrace.engine.errors import ConfigError
from headrace.engine.execution.largest_step import LargestStep
from headrace.engine.execution.memory_budget import MemoryBudget, MemoryUse, fitting, graph_bytes
from headrace.engine.kv_cache.block_pool import NULL_BLOCK
from headrace.engine.kv_cache.kv_memory import kv_shapes, zeros
from headrace.engine.lora_request import LoRARequest
from headrace.engine.models import load_model
from headrace.engine.sharding.ranks import ALONE, Ranks
from headrace.kernels.kv_cache import PADDING_SLOT

from ..families import FAMILIES, WITH_STATES

GIB = 2**30
USE = MemoryUse(total=80 * GIB, peak=20 * GIB, graphs=1 * GIB, others=2 * GIB)
CPU, GPU = torch.device("cpu"), torch.device("cuda")


def budget(model: ModelConfig, config: EngineConfig, device: torch.device = GPU, ranks: Ranks = ALONE) -> MemoryBudget:
    return MemoryBudget(model, config, torch.float32, torch.float32, device, ranks=ranks)


def test_the_kv_cache_gets_what_nobody_else_needs():
    assert USE.left_for_kv(0.9, 1) == 72 * GIB - 23 * GIB
    assert USE.left_for_kv(0.5, 1) == 17 * GIB


def test_too_little_says_how_much_is_needed_and_what_helps():
    with pytest.raises(ConfigError) as error:
        USE.left_for_kv(0.25, GIB)
    said = str(error.value)
    assert "gpu_memory_utilization=0.25 of 80.00 GiB leaves 0.00 GiB for the KV cache, which needs 1.00 GiB" in said
    assert "weights and the largest step take 20.00 GiB" in said
    assert "other processes and the driver 2.00 GiB, 24.00 GiB together" in said
    assert all(option in said for option in ("max_num_batched_tokens", "max_num_seqs", "enforce_eager", "quantised"))
    assert USE.left_for_kv(0.3, GIB) == GIB


def test_graphs_take_memory_by_their_largest_size_unless_there_are_none():
    # Once in their pool, and once on the stream where each is tried first.
    assert graph_bytes(EngineConfig(), 0, 35, GIB) == 2 * GIB
    # With a graph of each size, and forty at least.
    few, some, many = (graph_bytes(EngineConfig(), 32, num_sizes, GIB) for num_sizes in (1, 40, 60))
    assert 2 * GIB < few == some
    assert many - 2 * GIB == 60 * (some - 2 * GIB) // 40
    adapted = EngineConfig(enable_lora=True, lora_modules=[LoRARequest("kind", 1, "kind")])
    assert graph_bytes(adapted, 32, 40, GIB) - 2 * GIB == 2 * (some - 2 * GIB)
    assert graph_bytes(EngineConfig(enforce_eager=True), 32, 35, GIB) == 0
    assert graph_bytes(EngineConfig(tensor_parallel_size=2), 32, 35, GIB) == 0


class Told(Ranks):
    """What another rank hears of this one's memory."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def least(self, number: int) -> int:
        self.numbers.append(number)
        return min(number, 50)


def test_the_other_ranks_hear_of_one_without_room(model_config, monkeypatch):
    """They would wait for its number for ever."""
    monkeypatch.setattr(MemoryBudget, "measure_use", lambda *_: USE)
    model = load_model(model_config, EngineConfig(load_format="dummy"), torch.float32, CPU)
    told = Told()
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization=0\.25 of"):
        budget(model_config, EngineConfig(gpu_memory_utilization=0.25), ranks=told).caches(model, None)
    assert told.numbers == [0, 0]
    assert budget(model_config, EngineConfig(), ranks=told).caches(model, None) == (50, 0)
    assert told.numbers[2] == 0
    assert told.numbers[3] > 50


def test_ranks_have_as_many_states_as_the_one_with_the_least_room(tmp_path, monkeypatch):
    monkeypatch.setattr(MemoryBudget, "measure_use", lambda *_: USE)
    described = described_model(tmp_path, "qwen3.5", "Qwen3_5ForCausalLM")
    config = EngineConfig(load_format="dummy")
    model = load_model(described, config, torch.float32, CPU)
    assert budget(described, config).caches(model, None).num_states == 256 + 64
    assert budget(described, config, ranks=Told()).caches(model, None) == (50, 50)


def test_out_of_memory_at_the_start_is_an_option_to_change():
    with (
        pytest.raises(ConfigError, match=r"the model does not fit .* \(CUDA out of memory\. Tried"),
        fitting("the model"),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nSee documentation")


@pytest.fixture(scope="module")
def model_config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return described_model(tmp_path_factory.mktemp("model"), "llama", "LlamaForCausalLM")


def described_model(folder: Path, family: str, architecture: str) -> ModelConfig:
    (FAMILIES | WITH_STATES)[family].save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": [architecture]}))
    return ModelConfig.from_pretrained(folder)


@pytest.mark.parametrize(
    ("options", "on_cpu", "on_gpu"),
    [
        ({}, True, False),
        ({"kv_cache_memory_bytes": 2**20}, True, True),
        ({"num_gpu_blocks_override": 7}, True, True),
    ],
    ids=["nothing", "bytes", "blocks"],
)
def test_only_on_a_gpu_and_where_nothing_is_said_memory_is_measured(options, on_cpu, on_gpu, model_config):
    config = EngineConfig(**options)
    for device, is_stated in ((CPU, on_cpu), (GPU, on_gpu)):
        assert (budget(model_config, config, device).stated_num_blocks() is not None) == is_stated


@pytest.mark.parametrize(("max_num_seqs", "max_num_batched_tokens"), [(3, 10), (8, 5), (2, 10_000)])
def test_the_largest_step_is_as_large_as_the_limits_allow(max_num_seqs, max_num_batched_tokens, model_config):
    """And its cache of two blocks is enough, the first of which nothing is written to."""
    config = EngineConfig(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, max_model_len=40, load_format="dummy"
    )
    step = LargestStep.of(config, 40, CPU)
    num_seqs = min(max_num_seqs, max_num_batched_tokens)
    assert len(step.token_ids) == min(max_num_batched_tokens, num_seqs * 40)
    kept = step.slots[step.slots != PADDING_SLOT]
    assert len(kept.unique()) == len(kept)
    [shape] = kv_shapes(model_config, NULL_BLOCK + 2, config.block_size)
    kv_cache = zeros(shape, torch.float32, CPU)
    model = load_model(model_config, config, torch.float32, CPU)
    tokens = step.draw(model, step.forward(model, [kv_cache]))
    assert len(tokens) == num_seqs
    assert not kv_cache[:, :, NULL_BLOCK].any()
    assert kv_cache[:, :, NULL_BLOCK + 1].any()
