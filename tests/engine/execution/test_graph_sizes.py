"""For how many tokens there are CUDA graphs: as far as a step is short, which the model says."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.engine.config import MAX_GRAPH_SIZES, EngineConfig
from headrace.engine.execution import devices
from headrace.engine.execution.cuda_graphs import GraphLimits
from headrace.engine.execution.graph_sizes import HOPPER_FLOPS, default_sizes, graph_sizes, max_graphs
from headrace.engine.lora_request import LoRARequest

from ..test_config import read

# Qwen2.5-0.5B's and Llama-3-8B's layers.
SMALL: dict[str, Any] = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
}
LARGE: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({"max_num_seqs": 1, "max_num_batched_tokens": 1}, [1]),
        ({"max_num_seqs": 20, "max_num_batched_tokens": 20}, [1, 2, 4, 8, 16, 20]),
        ({"max_num_seqs": 20, "max_num_batched_tokens": 8}, [1, 2, 4, 8]),
        ({"max_num_seqs": 20, "max_num_batched_tokens": 45}, [1, 2, 4, 8, 16, 20, 24, 32, 40, 45]),
        # No step has more tokens.
        ({"max_num_seqs": 2, "max_model_len": 9}, [1, 2, 8, 16, 18]),
        ({"cuda_graph_sizes": [4, 1, 4]}, [1, 4]),
    ],
)
def test_no_size_is_of_more_tokens_than_a_step(options, sizes, tmp_path):
    assert list(graph_sizes(EngineConfig(**options), read(tmp_path))) == sizes


def test_close_where_a_step_is_short():
    sizes = default_sizes(1024, 0)
    assert (*sizes[:6], sizes[33:36], sizes[-2:]) == (1, 2, 4, 8, 16, 24, (248, 256, 272), (960, 1024))


@pytest.mark.parametrize("num_decodes", [2**15, 10**6])
def test_there_are_not_more_than_may_be_named(num_decodes):
    """Memory is set aside for a graph of each."""
    sizes = default_sizes(num_decodes, 0)
    assert sizes[-1] == num_decodes
    assert len(sizes) <= MAX_GRAPH_SIZES
    assert all(size - before <= max(16, before / 8) for before, size in pairwise(sizes))


@pytest.mark.parametrize("num_decodes", [1, 3, 60, 256, 1000])
def test_of_a_larger_step_at_most_an_eighth_is_padding_and_of_the_largest_a_quarter(num_decodes):
    sizes = default_sizes(num_decodes, 10_000)
    assert sizes[-1] == 8192
    assert {num_decodes, 2048} <= {*sizes}
    assert len(sizes) < 80
    beyond = [pair for pair in pairwise(sizes) if pair[0] >= num_decodes]
    assert all(
        0 < size - before <= max(8, before / 8) if before < 2048 else size - before <= before / 4
        for before, size in beyond
    )


def largest(folder: Path, model: dict[str, Any], flops: float = HOPPER_FLOPS, **options: Any) -> int:
    return graph_sizes(EngineConfig(**options), read(folder, **model), flops)[-1]


def test_as_far_as_the_host_takes_about_as_long_as_the_device(tmp_path):
    """A step of 8,192 tokens of 0.36 billion weights takes a Hopper GPU 20 ms, and without a graph the host 18."""
    assert largest(tmp_path, SMALL, max_num_batched_tokens=10_000) == 8192
    assert largest(tmp_path, SMALL, HOPPER_FLOPS / 2, max_num_batched_tokens=10_000) == 5760
    assert largest(tmp_path, SMALL, HOPPER_FLOPS / 10) == 1152
    # The default, and less.
    assert largest(tmp_path, SMALL) == 2048
    assert largest(tmp_path, SMALL, max_num_batched_tokens=1000) == 1000
    assert largest(tmp_path, LARGE) == 768
    assert largest(tmp_path, LARGE, max_num_seqs=16) == 768
    assert largest(tmp_path, LARGE, HOPPER_FLOPS / 10) == 256


@pytest.mark.parametrize(
    ("capability", "processors", "size"), [((9, 0), 132, 8192), ((8, 0), 108, 5824), ((8, 9), 58, 1792)]
)
def test_the_gpu_says_how_far_that_is(capability, processors, size, monkeypatch, tmp_path):
    """An H100, an A100 and an L4."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(devices, "num_processors", lambda device: processors)
    limits = GraphLimits.of(EngineConfig(max_num_batched_tokens=8192), read(tmp_path, **SMALL), torch.device("cuda"))
    sizes = default_sizes(256, size)
    assert limits == GraphLimits(sizes, 2048, 16, 256, max_graphs=max(40, len(sizes)))


def test_as_many_graphs_are_held_as_there_are_sizes(tmp_path):
    of_small, of_large = (len(graph_sizes(EngineConfig(), read(tmp_path, **model))) for model in (SMALL, LARGE))
    assert max_graphs(EngineConfig(), of_small) == of_small == 59
    assert max_graphs(EngineConfig(), of_large) == of_large == 47
    assert max_graphs(EngineConfig(), 30) == 40


def test_steps_with_adapters_have_graphs_of_their_own():
    """Room for them is set aside where it is known that there will be such: every worker could have some."""
    expected = EngineConfig(enable_lora=True, lora_modules=[LoRARequest("kind", 1, "kind")])
    assert max_graphs(expected, 55) == 110
    assert max_graphs(EngineConfig(enable_lora=True), 55) == 55


def test_steps_of_decodes_have_room_of_their_own():
    def tiers(*sizes: int) -> list[int]:
        return GraphLimits(sizes, 10, 16, max_num_seqs=5, max_graphs=40).tiers

    assert tiers(1, 4, 6, 8, 12) == [6, 12]
    assert tiers(1, 5) == [5]
    assert tiers(1, 4) == [4]
