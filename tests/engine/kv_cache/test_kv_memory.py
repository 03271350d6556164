"""What is done with blocks is done in each of a model's caches."""

import pytest
import torch

from headrace.engine.checkpoints.model_config import ModelConfig
from headrace.engine.kv_cache.kv_memory import KVMemory


@pytest.fixture
def memory(checkpoint) -> KVMemory:
    """Of a model with two kinds of heads; each block of each cache has a number of its own."""
    config = ModelConfig.from_pretrained(checkpoint("gemma4").folder)
    memory = KVMemory(config, 4, 8, torch.float32, torch.device("cpu"))
    assert len(memory.caches) == 2
    for cache in memory.caches:
        cache += torch.arange(cache.shape[2])[:, None, None, None]
    return memory


def blocks(memory: KVMemory) -> list[list[float]]:
    """The number that each block of each cache has, and all of it has that one."""
    numbers = [cache.transpose(0, 2).flatten(1) for cache in memory.caches]
    assert all((each == each[:, :1]).all() for each in numbers)
    return [each[:, 0].tolist() for each in numbers]


def test_blocks_are_copied(memory):
    memory.copy([(1, 2), (3, 4)])
    assert blocks(memory) == [[0, 1, 1, 3, 3]] * 2


def test_blocks_are_zeroed(memory):
    memory.zero([2, 3])
    assert blocks(memory) == [[0, 1, 0, 0, 4]] * 2


def test_blocks_are_swapped_out_and_in(memory):
    content = memory.swap_out([2, 4])
    memory.zero([1, 2, 3, 4])
    memory.swap_in(content, 1, [3])
    assert blocks(memory) == [[0, 0, 0, 4, 0]] * 2
