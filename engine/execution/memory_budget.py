"""How much memory is for the KV cache: as the options say, or what a GPU has left beside the largest step."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ...kernels.paged_attention import AttentionMetadata, plan_bytes
from ..checkpoints.model_config import ModelConfig
from ..checkpoints.model_size import KEPT_STATES, state_bytes
from ..checkpoints.vision_config import VisionConfig
from ..config import DEFAULT_KV_CACHE_BYTES, EngineConfig
from ..errors import ConfigError
from ..kv_cache.block_pool import NULL_BLOCK
from ..kv_cache.kv_memory import block_bytes, kv_shapes, num_blocks_in, zeros
from ..kv_cache.state_memory import StateMemory
from ..models import Decoder
from ..sharding.ranks import ALONE, Ranks
from .cuda_graphs import GraphLimits
from .device_faults import is_out_of_memory
from .graph_sizes import max_graphs
from .largest_step import LargestStep

logger = logging.getLogger(__name__)

# Of states: so that the most urgent sequence gets on by itself, and some prefix may keep one.
_MIN_STATES = 4

# What the driver keeps for a captured graph, a layer: about twenty launches with their arguments.
_GRAPH_BYTES_PER_LAYER = 512 * 1024
_HELP = (
    "Raise gpu_memory_utilization, lower max_num_batched_tokens or max_num_seqs, set enforce_eager, or take a "
    "checkpoint that is quantised"
)


@dataclass(frozen=True)
class MemoryUse:
    """What a GPU's memory is taken by without a KV cache, in bytes.

    `total`: all there is. `peak`: the most that this process had in its largest step, weights included. `graphs`: what
    CUDA graphs are going to take. `others`: what other processes have, and the driver for this one.
    """

    total: int
    peak: int
    graphs: int
    others: int

    def left_for_kv(self, utilization: float, least: int) -> int:
        """What of the share `utilization` of all memory nobody else needs. Raises `ConfigError`: not even `least`."""
        left = int(self.total * utilization) - self.peak - self.graphs - self.others
        if left < least:
            needed = self.peak + self.graphs + self.others + least
            raise ConfigError(
                f"gpu_memory_utilization={utilization:g} of {gib(self.total)} leaves {gib(max(left, 0))} for the KV "
                f"cache, which needs {gib(least)} at least: weights and the largest step take {gib(self.peak)}, CUDA "
                f"graphs {gib(self.graphs)}, other processes and the driver {gib(self.others)}, {gib(needed)} "
                f"together. {_HELP}"
            )
        return left


@dataclass(frozen=True)
class SecondModel:
    """What a model beside the first one is going to take, in bytes: for each KV block, and for CUDA graphs."""

    block_bytes: int = 0
    graph_bytes: int = 0


NO_SECOND_MODEL = SecondModel()


class Caches(NamedTuple):
    """How many KV blocks there are, and how many states of sequences: 0 of a model without."""

    num_blocks: int
    num_states: int


@dataclass(frozen=True)
class MemoryBudget:
    """What a model, or the share of it that one of `ranks` has, gets of the memory of its device.

    `dtype`: the weights' and the states'. `second`: what a model beside it takes that is loaded already.
    `vision`: the whole model's, also of a share that sees nothing.
    """

    model: ModelConfig
    config: EngineConfig
    dtype: torch.dtype
    kv_dtype: torch.dtype
    device: torch.device
    second: SecondModel = NO_SECOND_MODEL
    ranks: Ranks = ALONE
    vision: VisionConfig | None = None

    def stated_num_blocks(self) -> int | None:
        """How many KV blocks the options ask for; None where what is left of a GPU's memory is to say.

        Raises `ConfigError` where they ask for too few.
        """
        config = self.config
        if config.num_gpu_blocks_override is not None:
            return config.num_gpu_blocks_override
        if config.kv_cache_memory_bytes is None and self.device.type == "cuda":
            return None
        return self._num_blocks_in(config.kv_cache_memory_bytes or DEFAULT_KV_CACHE_BYTES)

    def caches(self, decoder: Decoder, stated_num_blocks: int | None) -> Caches:
        """What there is to be: as `stated_num_blocks` has it, or what is left beside `decoder`.

        Of all `ranks` the fewest. Raises `ConfigError` where there is no room for any: the other ranks hear of 0 then.
        States get half of what is left at most, beside stated blocks as much as those.
        """
        if stated_num_blocks is None:
            return self._measured_caches(decoder)
        num_blocks = self.ranks.least(stated_num_blocks)
        return Caches(num_blocks, self.ranks.least(self._num_states_in(num_blocks * self._block_bytes)))

    def _measured_caches(self, decoder: Decoder) -> Caches:
        use, ranks = self.measure_use(decoder), self.ranks
        use = replace(use, graphs=use.graphs + self.second.graph_bytes)
        least = 2 * (self._block_bytes + self.second.block_bytes) + _MIN_STATES * self._state_bytes
        try:
            left = use.left_for_kv(self.config.gpu_memory_utilization, least)
        except ConfigError:
            # They wait to hear of both.
            ranks.least(0)
            ranks.least(0)
            raise
        num_states = ranks.least(self._num_states_in(left // 2))
        left -= num_states * self._state_bytes
        num_blocks = self._num_blocks_in(left)
        logger.info("%s for %d KV blocks beside %s and %d states", gib(left), num_blocks, use, num_states)
        return Caches(ranks.least(num_blocks), num_states)

    @property
    def _block_bytes(self) -> int:
        return block_bytes(self.model, self.config.block_size, self.kv_dtype)

    @property
    def _state_bytes(self) -> int:
        return state_bytes(self.model, self.dtype.itemsize)

    def _num_blocks_in(self, memory_bytes: int) -> int:
        return num_blocks_in(memory_bytes, self.model, self.config.block_size, self.kv_dtype, self.second.block_bytes)

    def _num_states_in(self, memory_bytes: int) -> int:
        """How many fit, of as many as could be of use: one for each sequence that runs, and some to be kept.

        There are a few in any case.
        """
        if self.model.state_layers is None:
            return 0
        useful = self.config.max_num_seqs + max(KEPT_STATES, self.config.max_num_seqs // 4)
        return max(_MIN_STATES, min(useful, memory_bytes // self._state_bytes))

    def measure_use(self, decoder: Decoder) -> MemoryUse:
        """Run the largest step on the GPU that holds `decoder`. Raises `ConfigError` where that does not fit."""
        config, model, device = self.config, self.model, self.device
        max_model_len = config.longest_sequence(model.max_position_embeddings)
        shapes = kv_shapes(model, NULL_BLOCK + 2, config.block_size)
        kv_caches = [zeros(shape, self.kv_dtype, device) for shape in shapes]
        states = StateMemory(model, 1, self.dtype, device) if model.state_layers else None
        tower = decoder.vision
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        with fitting(f"a step of max_num_batched_tokens={config.max_num_batched_tokens}"):
            # What is known of images lies beside any step.
            kept = None if tower is None else tower.room(config.max_kept_vectors, max_model_len)
            before = torch.cuda.memory_reserved(device)
            max_uncut = 1 if self.vision is None else self.vision.max_uncut_tokens
            step = LargestStep.of(config, max_model_len, device, num_beyond=max_uncut - 1)
            hidden = step.forward(decoder, kv_caches, states)
            forward_bytes = torch.cuda.max_memory_reserved(device) - before
            step.draw(decoder, hidden)
            if self.vision is not None and self.vision.is_two_way:
                step.with_span(max_uncut, self.vision.two_way_layers == "windows").forward(decoder, kv_caches)
            if tower is not None:
                tower.encode_largest(max_model_len)
            torch.cuda.synchronize(device)
        del kept
        free, total = torch.cuda.mem_get_info(device)
        limits = GraphLimits.of(config, model, device)
        most = limits.sizes[-1]
        largest_graph_bytes = most * (forward_bytes // len(step.token_ids)) + decoder.scratch_bytes(most)
        return MemoryUse(
            total=total,
            peak=torch.cuda.max_memory_reserved(device),
            graphs=graph_bytes(config, model.num_hidden_layers, len(limits.sizes), largest_graph_bytes)
            + _plan_bytes(config, limits, step.attention),
            others=total - free - torch.cuda.memory_reserved(device),
        )


def graph_bytes(config: EngineConfig, num_layers: int, num_sizes: int, forward_bytes: int) -> int:
    """About what CUDA graphs of so many sizes take, of which the largest's forward pass takes `forward_bytes`.

    That is what all of them share a pool of, and what the stream keeps on which each is tried before its capture.
    """
    if not config.may_use_graphs:
        return 0
    return 2 * forward_bytes + max_graphs(config, num_sizes) * num_layers * _GRAPH_BYTES_PER_LAYER


def _plan_bytes(config: EngineConfig, limits: GraphLimits, attention: AttentionMetadata) -> int:
    """What the memory for plans takes that graphs read, for layers like those that a step with `attention` ran."""
    if not config.may_use_graphs:
        return 0
    keys, longest = list(attention.device_plans), limits.blocks_per_sequence
    return sum(plan_bytes(keys, tier, longest, attention.device) for tier in limits.tiers)


@contextmanager
def fitting(what: str) -> Iterator[None]:
    """Raises `ConfigError` where `what` is more than the GPU has memory for."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise ConfigError(f"{what} does not fit into the GPU's memory ({_first_line(error)}). {_HELP}") from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "out of memory")


def gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
