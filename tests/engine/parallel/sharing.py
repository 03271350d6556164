"""What processes that share a model compute together; here they are threads."""

import os
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from headrace.engine.checkpoints.model_config import ModelConfig
from headrace.engine.config import EngineConfig
from headrace.engine.kv_cache.kv_memory import kv_shapes
from headrace.engine.kv_cache.state_memory import StateMemory
from headrace.engine.kv_cache.state_pool import NULL_STATE
from headrace.engine.models import Decoder, load_model
from headrace.engine.models.layer_states import LayerStates
from headrace.engine.parallel.messages import Task
from headrace.engine.parallel.rank_process import _follow
from headrace.engine.parallel.rank_processes import _Rank
from headrace.engine.sharding.ranks import ALONE, ProcessRanks, Ranks
from headrace.kernels.paged_attention import AttentionMetadata
from headrace.kernels.recurrent_states import StateSlots

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
    """[len(TOKENS), vocab], on rank 0 of the last stage; of the others what they have computed."""
    positions = torch.arange(len(TOKENS))
    kv_caches = [torch.zeros(shape, dtype=dtype) for shape in kv_shapes(model.config, 2, BLOCK_SIZE)]
    attention = AttentionMetadata([len(TOKENS)], [len(TOKENS)], [[1]], BLOCK_SIZE, CPU)
    states = states_of(model.config, dtype)
    hidden = model.forward(TOKENS, positions, kv_caches, BLOCK_SIZE + positions, attention, states=states)
    return model.logits(hidden).float() if model.stage.is_last else hidden


def states_of(config: ModelConfig, dtype: torch.dtype) -> LayerStates | None:
    """Of one sequence, if there are such."""
    if config.state_layers is None:
        return None
    return StateMemory(config, 1, dtype, CPU).of(StateSlots([len(TOKENS)], [NULL_STATE], [NULL_STATE + 1], CPU))


def shared_logits(config: ModelConfig, size: int, way: Way = Way(), num_stages: int = 1) -> Tensor:
    """What ranks compute together."""

    def compute(ranks: Ranks) -> Tensor:
        model = way.load(config, ranks)
        model.prepack(way.quantization)
        ranks.meet()
        return logits_of(model, way.dtype)

    return together(compute, config.path / f"rendezvous-{way}-{size}-{num_stages}", size, num_stages)


def together(compute: Callable[[Ranks], Tensor], rendezvous: Path, size: int, num_stages: int) -> Tensor:
    """What the first of all ranks computes with the others, each in a thread of its own."""
    num_processes = size * num_stages
    barrier = threading.Barrier(num_processes)
    # Until all are through: one that is gone has closed its connections, whatever the others had not read yet.
    all_ranks = [
        ProcessRanks(number, size, CPU, str(rendezvous), barrier.wait, num_stages) for number in range(num_processes)
    ]

    # Those that wait for another one fail after it.
    errors: list[BaseException] = []

    def one(ranks: ProcessRanks) -> Tensor:
        try:
            return compute(ranks)
        except BaseException as error:
            errors.append(error)
            barrier.abort()
            # Its connections close, for who waits for it to hear of it.
            ranks._handed_on.clear()
            ranks._world = ranks._group = None
            raise

    with ThreadPoolExecutor(num_processes) as threads:
        running = [threads.submit(one, ranks) for ranks in all_ranks]
    if errors:
        raise errors[0]
    return running[0].result()


def saved_logits(config: ModelConfig) -> Tensor:
    """The whole model's, whose random weights are written to a file."""
    model = Way().load(config)
    tensors = {slot.name: slot.stored().contiguous() for slot in model.weight_slots()}
    save_file(tensors, config.path / "model.safetensors")
    model.prepack()
    return logits_of(model)


def assert_close(found: Tensor, expected: Tensor) -> None:
    """But for roundings, which states gather."""
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)


class RankThread(threading.Thread):
    """A rank that does as it is told in this process: to start one of its own takes seconds. Treated as a process."""

    pid = os.getpid()

    def __init__(self, leader: Connection) -> None:
        super().__init__(daemon=True)
        self._leader = leader
        self._is_killed = False

    def run(self) -> None:
        with self._leader, suppress(EOFError, ConnectionError):
            _follow(self._leader)

    def kill(self) -> None:
        self._is_killed = True

    def wait(self, timeout: float | None = None) -> int:
        if not self._is_killed:
            self.join(timeout)
        if self.is_alive() and not self._is_killed:
            raise subprocess.TimeoutExpired("rank", timeout or 0)
        return 0


def started_as_thread(task: Task) -> _Rank:
    """For `rank_processes._started`."""
    ours, theirs = Pipe()
    thread: Any = RankThread(theirs)
    thread.start()
    ours.send(task)
    return _Rank(task.rank, thread, ours)
