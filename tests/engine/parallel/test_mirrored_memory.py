"""Whatever is done with rank 0's blocks is done with those of the others, who keep nothing that nobody asks for."""

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from headrace.engine.checkpoints.model_config import ModelConfig
from headrace.engine.config import EngineConfig
from headrace.engine.execution.model_runner import ModelRunner
from headrace.engine.parallel.mirrored_memory import MirroredMemory
from headrace.engine.parallel.rank_process import Follower
from headrace.engine.sharding.ranks import ProcessRanks, Ranks

from .small_models import write_model

OPTIONS = EngineConfig(load_format="dummy", num_gpu_blocks_override=9, block_size=4, max_model_len=32)


@pytest.fixture
def model(tmp_path: Path) -> ModelConfig:
    return ModelConfig.from_pretrained(write_model(tmp_path))


def test_blocks_of_both_ranks_go_the_same_ways(model):
    ours, theirs = (ModelRunner(model, OPTIONS) for _ in range(2))
    content = torch.randn(ours.memory.caches[0].shape)
    for runner in (ours, theirs):
        runner.memory.caches[0].copy_(content)
    # They compute nothing together.
    follower = Follower(theirs, OPTIONS, ProcessRanks(1, 2, torch.device("cpu"), "", lambda: None))
    memory = MirroredMemory(ours.memory, follower.carry_out)
    swapped = memory.swap_out([1, 2, 3])
    memory.zero([1, 2])
    memory.copy([(4, 5)])
    memory.swap_in(swapped, 1, [2, 6])
    [cache] = memory.caches
    assert torch.equal(theirs.memory.caches[0], cache)
    # The first of the three stays away.
    assert not cache[:, :, 1].any()
    assert torch.equal(cache[:, :, [2, 6]], content[:, :, [2, 3]])
    assert list(follower._swapped) == [0]
    del swapped
    gc.collect()
    kept = memory.swap_out([7])
    assert list(follower._swapped) == [kept.number]


class Poorer(Ranks):
    """Beside one that has memory for less."""

    def least(self, number: int) -> int:
        return min(number, 7)


def test_all_have_as_many_blocks_as_the_one_with_the_fewest(model, tmp_path):
    assert ModelRunner(model, OPTIONS, ranks=Poorer()).memory.num_blocks == 7
    barrier = threading.Barrier(2)
    both = [ProcessRanks(rank, 2, torch.device("cpu"), str(tmp_path / "rendezvous"), barrier.wait) for rank in range(2)]

    def least(ranks: Ranks) -> int:
        ranks.meet()
        return ranks.least(7 + ranks.rank)

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(least, both)) == [7, 7]
