"""Ctrl-C lets a step be computed to its end."""

import os
import signal
from contextlib import closing
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from headrace.engine.checkpoints.model_config import ModelConfig
from headrace.engine.config import EngineConfig
from headrace.engine.execution.model_runner import ModelRunner
from headrace.engine.kv_cache.kv_memory import KVMemory
from headrace.engine.parallel import rank_processes
from headrace.engine.parallel.interrupts import interrupts_held
from headrace.engine.parallel.messages import CopyBlocks, Order, SwapIn, SwapOut, ZeroBlocks
from headrace.engine.parallel.mirrored_memory import MirroredMemory
from headrace.engine.parallel.parallel_runner import ParallelRunner

from .batches import batch
from .sharing import started_as_thread
from .small_models import write_model


def test_it_comes_after_what_it_must_not_cut_short():
    done = []

    def step() -> None:
        with interrupts_held():
            os.kill(os.getpid(), signal.SIGINT)
            done.append(True)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        step()
    assert done == [True]
    assert signal.getsignal(signal.SIGINT) is before


def test_without_it_nothing_happens():
    with interrupts_held():
        pass


@pytest.mark.parametrize("order", [CopyBlocks, ZeroBlocks, SwapIn, SwapOut])
def test_blocks_are_treated_alike_on_all_ranks_before_it_comes(order, tmp_path):
    """It comes when the others have been told, and rank 0 has still to do what they do."""
    told = []

    def tell(each: Order) -> None:
        told.append(type(each))
        if isinstance(each, order):
            os.kill(os.getpid(), signal.SIGINT)

    model = ModelConfig.from_pretrained(write_model(tmp_path))
    memory = MirroredMemory(KVMemory(model, 4, 8, torch.float32, torch.device("cpu")), tell)
    [cache] = memory.caches
    cache[:, :, 1:3] = 1
    with pytest.raises(KeyboardInterrupt):
        _do_all(memory)
    filled = [bool(cache[:, :, block].any()) for block in (2, 3, 4)]
    all_told = [SwapOut, SwapIn, CopyBlocks, ZeroBlocks]
    assert told == all_told[: all_told.index(order) + 1]
    assert filled == [order is not ZeroBlocks, order is not SwapOut, order in (CopyBlocks, ZeroBlocks)]


def _do_all(memory: MirroredMemory) -> None:
    swapped = memory.swap_out([1])
    memory.swap_in(swapped, 0, [3])
    memory.copy([(2, 4)])
    memory.zero([2])


def test_a_step_is_told_to_all_stages_before_it_comes(tmp_path, monkeypatch):
    """It comes when the first stage has been told, and the second one has not."""
    monkeypatch.setattr(rank_processes, "_started", started_as_thread)
    model = ModelConfig.from_pretrained(write_model(tmp_path, num_hidden_layers=3))
    options: dict[str, Any] = {"load_format": "dummy", "device": "cpu", "num_gpu_blocks_override": 8, "num_threads": 1}
    runner = ParallelRunner.start(model, EngineConfig(pipeline_parallel_size=3, **options))
    send_bytes, told = Connection.send_bytes, []

    def interrupted(self: Connection, message: bytes) -> None:
        send_bytes(self, message)
        told.append(self)
        if len(told) == 1:
            signal.raise_signal(signal.SIGINT)

    with closing(runner.processes):
        with monkeypatch.context() as patched:
            patched.setattr(Connection, "send_bytes", interrupted)
            with pytest.raises(KeyboardInterrupt):
                runner.execute(batch([9], [9]))
        assert told == [rank.connection for rank in runner.processes._ranks]
        # All have computed it: the next step reads what each stage has written of this one.
        alone = ModelRunner(model, EngineConfig(**options))
        alone.execute(batch([9], [9]))
        torch.testing.assert_close(runner.execute(batch([4], [13])), alone.execute(batch([4], [13])))
