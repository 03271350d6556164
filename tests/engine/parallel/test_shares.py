"""Shares of a model compute together what the whole model does, however many there are."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from headrace.engine.checkpoints.model_config import ModelConfig
from headrace.engine.config import EngineConfig
from headrace.engine.errors import ConfigError
from headrace.engine.kv_cache.kv_memory import kv_shape
from headrace.engine.lora_request import LoRARequest
from headrace.engine.models import Decoder, load_model
from headrace.engine.sharding.ranks import ALONE, ProcessRanks, Ranks
from headrace.engine.sharding.shard import Shard
from headrace.kernels.linear import supports_int8
from headrace.kernels.paged_attention import AttentionMetadata

from .small_models import MODELS, QUANTIZED, write_model

CPU = torch.device("cpu")
TOKENS = torch.tensor([3, 299, 150, 7, 75, 76, 225, 226, 0, 300, 12])
BLOCK_SIZE = 16


@dataclass(frozen=True)
class Way:
    """How a model is loaded: from random weights or a file, and what it computes in."""

    load_format: str = "dummy"
    dtype: torch.dtype = torch.float32
    quantization: str | None = None

    def load(self, config: ModelConfig, ranks: Ranks = ALONE) -> Decoder:
        options = EngineConfig(load_format=self.load_format, max_model_len=32, seed=5)
        return load_model(config, options, self.dtype, CPU, ranks)


FROM_FILE = Way("auto")


@torch.inference_mode()
def logits_of(model: Decoder, dtype: torch.dtype = torch.float32) -> Tensor:
    """[len(TOKENS), vocab], on rank 0."""
    positions = torch.arange(len(TOKENS))
    kv_cache = torch.zeros(kv_shape(model.config, 2, BLOCK_SIZE), dtype=dtype)
    attention = AttentionMetadata([len(TOKENS)], [len(TOKENS)], [[1]], BLOCK_SIZE, CPU)
    return model.logits(model.forward(TOKENS, positions, kv_cache, BLOCK_SIZE + positions, attention)).float()


def shared_logits(config: ModelConfig, size: int, way: Way = Way()) -> Tensor:
    """What ranks compute together, each in a thread of its own."""
    barrier = threading.Barrier(size)
    rendezvous = str(config.path / f"rendezvous-{way}-{size}")

    def compute(rank: int) -> Tensor:
        ranks = ProcessRanks(rank, size, CPU, rendezvous, barrier.wait)
        try:
            model = way.load(config, ranks)
        except BaseException:
            barrier.abort()
            raise
        model.prepack(way.quantization)
        ranks.meet()
        return logits_of(model, way.dtype)

    with ThreadPoolExecutor(size) as threads:
        running = [threads.submit(compute, rank) for rank in range(size)]
        errors = [error for each in running if (error := each.exception()) is not None]
        # Those that wait for another one fail after it.
        for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error
    return running[0].result()


def saved_logits(config: ModelConfig) -> Tensor:
    """The whole model's, whose random weights are written to a file."""
    model = Way().load(config)
    tensors = {slot.name: slot.stored().contiguous() for slot in model.weight_slots()}
    save_file(tensors, config.path / "model.safetensors")
    model.prepack()
    return logits_of(model)


@pytest.mark.parametrize("name", MODELS)
def test_of_every_family(name, tmp_path):
    config = ModelConfig.from_pretrained(write_model(tmp_path, name))
    expected = saved_logits(config)
    # Drawn: the same random weights. Then read: each its slices. Four of some models share heads of keys.
    torch.testing.assert_close(shared_logits(config, 2), expected)
    torch.testing.assert_close(shared_logits(config, 4, FROM_FILE), expected)


@pytest.mark.parametrize("name", QUANTIZED)
def test_of_quantised_checkpoints(name, tmp_path):
    config = ModelConfig.from_pretrained(write_model(tmp_path, quantization_config=QUANTIZED[name], hidden_size=128))
    expected = saved_logits(config)
    assert expected.isfinite().all()
    torch.testing.assert_close(shared_logits(config, 2), expected)
    torch.testing.assert_close(shared_logits(config, 2, FROM_FILE), expected)


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_in_layouts_of_the_compiled_kernels(quantization, tmp_path):
    """They round: to bfloat16, and each rank its activations to int8 by scales of its own."""
    if quantization and not supports_int8(torch.bfloat16, CPU):
        pytest.skip("no compiled kernels here")
    config = ModelConfig.from_pretrained(write_model(tmp_path, "llama-bias-tied"))
    expected = logits_of(Way().load(config))
    found = shared_logits(config, 2, Way(dtype=torch.bfloat16, quantization=quantization))
    assert (found - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize(
    ("fields", "size", "message"),
    [
        ({}, 3, "tensor_parallel_size=3 must divide num_attention_heads=8"),
        ({"num_attention_heads": 12, "num_key_value_heads": 4}, 6, "num_key_value_heads=4"),
        ({"intermediate_size": 129}, 2, "tensor_parallel_size=2 must divide intermediate_size=129"),
        ({"quantization_config": {**QUANTIZED["gptq"], "desc_act": True}}, 2, "desc_act"),
    ],
)
def test_what_cannot_be_shared_is_refused_with_both_numbers(fields, size, message, tmp_path):
    config = ModelConfig.from_pretrained(write_model(tmp_path, **fields))
    with pytest.raises(ConfigError, match=message):
        Shard(0, size, config)


def test_groups_of_a_quantised_weight_stay_whole(tmp_path):
    config = ModelConfig.from_pretrained(write_model(tmp_path, quantization_config=QUANTIZED["gptq"], hidden_size=128))
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=8 would split groups of 32 inputs of .*o_proj"):
        shared_logits(config, 8)


@pytest.mark.parametrize(
    "options",
    [
        {"enable_lora": True},
        {"lora_modules": [LoRARequest("adapter", 1, "adapter")]},
        {"speculative_config": {"method": "draft_model", "model": "draft"}},
    ],
)
def test_what_does_not_go_with_it_is_refused_by_both_names(options):
    with pytest.raises(ConfigError, match=rf"{next(iter(options))}.* tensor_parallel_size=2"):
        EngineConfig(tensor_parallel_size=2, **options)
