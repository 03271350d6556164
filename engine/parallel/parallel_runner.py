"""The runner of a model that several processes share, in the first of them: the one that has the engine.

It has the last layers, where not all have all: the logits are here, to sample from, and no token has to come back.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Self
from weakref import finalize

import torch
from torch import Tensor

from ..checkpoints.model_config import ModelConfig
from ..config import EngineConfig
from ..errors import ConfigError, EngineDeadError
from ..execution.batch import Batch
from ..execution.devices import resolve_device
from ..execution.model_runner import ModelRunner
from ..kv_cache.kv_memory import block_bytes
from ..lora.adapter import Adapter, adaptable
from ..lora.adapters import LoraAdapters
from ..models import whole_parts
from ..sharding.ranks import ProcessRanks
from ..sharding.stages import own_model, require_parallel
from .interrupts import interrupts_held
from .mirrored_memory import MirroredMemory
from .rank_processes import RankProcesses
from .shared_adapters import AdapterShares, OwnAdapters
from .step_messages import StepWriter, heard_with


class ParallelRunner(ModelRunner):
    """Rank 0, which tells the others of every step before it computes its own share."""

    processes: RankProcesses

    def __init__(self, model_config: ModelConfig, config: EngineConfig, processes: RankProcesses) -> None:
        self.processes = processes
        # The others live as long as this.
        finalize(self, processes.close)
        device = torch.device(config.device)
        tensor, pipeline = config.tensor_parallel_size, config.pipeline_parallel_size
        ranks = ProcessRanks(0, tensor, device, processes.rendezvous, processes.meet, pipeline)
        super().__init__(model_config, config, ranks=ranks)
        processes.is_computing = False
        if not self.memory.num_blocks:
            raise processes.fail(EngineDeadError("a rank has no memory for KV blocks"))
        self._ranks_told = ranks
        self._writer = StepWriter(model_config.vocab_size)
        self.memory = MirroredMemory(self.memory, processes.tell)
        # Of a block the first stage has as much as any.
        first = own_model(model_config, 0, pipeline, 0, tensor)
        self.memory.block_bytes = block_bytes(first, config.block_size, self._kv_dtype)
        if self.adapters is not None:
            own = OwnAdapters(self.adapters, ranks)
            parts = adaptable(whole_parts(model_config, self.dtype))
            self._shares = AdapterShares(own, model_config, parts, (tensor, pipeline), processes.tell_each)
            self.loras = LoraAdapters(parts, config, self.dtype, self._install_adapters)

    @classmethod
    def start(cls, model_config: ModelConfig, config: EngineConfig) -> Self:
        """With its processes. Raises `ConfigError` where the model or this host has no so many parts."""
        require_parallel(model_config, config.tensor_parallel_size, config.pipeline_parallel_size)
        device = resolve_device(config.device)
        if device.type == "cuda":
            _expect_gpus(config)
        num_threads = config.num_threads
        if num_threads is None and device.type == "cpu":
            num_threads = max(1, torch.get_num_threads() // config.world_size)
        config = replace(config, device=device.type, num_threads=num_threads)
        processes = RankProcesses(model_config, config)
        try:
            runner = cls(model_config, config, processes)
        except BaseException:
            processes.close()
            raise
        return runner

    def execute(self, batch: Batch) -> Tensor:
        try:
            return self._execute(batch)
        except EngineDeadError:
            raise
        # Whatever it was, the others have gone on.
        except Exception as error:
            raise self.processes.fail(error) from error

    @torch.inference_mode()
    def _execute(self, batch: Batch) -> Tensor:
        with interrupts_held(), self._computing():
            self.processes.tell(self._writer.message(batch))
            self._ranks_told.hear(heard_with(batch))
            return super().execute(batch)

    def _install_adapters(self, held: Sequence[Adapter]) -> None:
        try:
            with interrupts_held(), self._computing():
                self._shares.install(held)
        except (EngineDeadError, torch.OutOfMemoryError):
            raise
        # As of a step.
        except Exception as error:
            raise self.processes.fail(error) from error

    @contextmanager
    def _computing(self) -> Iterator[None]:
        self.processes.is_computing = True
        try:
            yield
        finally:
            self.processes.is_computing = False


def _expect_gpus(config: EngineConfig) -> None:
    if (found := torch.cuda.device_count()) < config.world_size:
        raise ConfigError(f"{config.parallel_options} needs {config.world_size} GPUs, and this process sees {found}")
    # All ranks are on this host: NCCL would listen where others reach it too.
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
