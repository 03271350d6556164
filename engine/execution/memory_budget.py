"""How much of a GPU's memory is left for the KV cache, measured by the largest step there can be."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...kernels.gated_delta import StateSlots
from ...kernels.kv_cache import PADDING_SLOT
from ...kernels.paged_attention import AttentionMetadata, plan_bytes
from ...kernels.sampling import likeliest_tokens, sample_tokens
from ..checkpoints.model_config import ModelConfig
from ..checkpoints.model_size import KEPT_STATES, state_bytes
from ..config import DEFAULT_KV_CACHE_BYTES, EngineConfig
from ..errors import ConfigError
from ..kv_cache.block_pool import NULL_BLOCK
from ..kv_cache.kv_memory import block_bytes, kv_shape, num_blocks_in, zeros
from ..kv_cache.state_memory import StateMemory
from ..kv_cache.state_pool import NULL_STATE
from ..models import Decoder
from ..sharding.ranks import ALONE, Ranks
from .cuda_graphs import GraphLimits
from .device_faults import is_out_of_memory
from .graph_sizes import max_graphs

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


@dataclass(frozen=True)
class LargestStep:
    """The tokens of a step that is as large as the limits allow, of sequences as long as they may get.

    All sequences have one and the same block over and over, so that a cache of two blocks is enough. No two tokens are
    written to one place: those that it has no room for are not kept.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    attention: AttentionMetadata
    num_logits: int

    @classmethod
    def of(cls, config: EngineConfig, max_model_len: int, device: torch.device) -> "LargestStep":
        num_seqs = min(config.max_num_seqs, config.max_num_batched_tokens)
        num_tokens = min(config.max_num_batched_tokens, num_seqs * max_model_len)
        share, rest = divmod(num_tokens, num_seqs)
        lens = [share + (index < rest) for index in range(num_seqs)]
        table = [NULL_BLOCK + 1] * -(-max_model_len // config.block_size)
        positions = torch.cat([torch.arange(max_model_len - length, max_model_len) for length in lens])
        slots = torch.full((num_tokens,), PADDING_SLOT)
        num_kept = min(num_tokens, config.block_size)
        slots[:num_kept] = (NULL_BLOCK + 1) * config.block_size + torch.arange(num_kept)
        return cls(
            token_ids=torch.zeros(num_tokens, dtype=torch.int64, device=device),
            positions=positions.to(device),
            slots=slots.to(device),
            attention=AttentionMetadata(
                lens, [max_model_len] * num_seqs, [table] * num_seqs, config.block_size, device
            ),
            num_logits=min(config.max_num_logits, num_tokens),
        )

    @torch.inference_mode()
    def forward(self, model: Decoder, kv_cache: Tensor, states: StateMemory | None = None) -> Tensor:
        """What a graph would compute of it: [num_tokens, hidden_size].

        Layers with states have all tokens for one sequence's: it takes one state, and the memory that a prompt takes.
        """
        layer_states = None
        if states is not None:
            one = StateSlots([len(self.token_ids)], [NULL_STATE], [NULL_STATE + 1], self.token_ids.device)
            layer_states = states.of(one)
        return model.forward(self.token_ids, self.positions, kv_cache, self.slots, self.attention, states=layer_states)

    @torch.inference_mode()
    def draw(self, model: Decoder, hidden: Tensor) -> Tensor:
        """A token of each sequence and of each guess, as a step draws it where every sequence has wishes.

        A stage but the last gives what it hands on.
        """
        if not model.stage.is_last:
            return hidden
        logits = model.logits(hidden[: self.num_logits])
        likeliest_tokens(logits, with_log_sum_exp=True)
        ones = torch.ones(len(logits), dtype=torch.float64, device=logits.device)
        return sample_tokens(logits.float(), ones, ones.long(), ones, ones, ones / 2)


def num_states_in(memory_bytes: int, model: ModelConfig, config: EngineConfig, dtype: torch.dtype) -> int:
    """How many states of sequences fit, of as many as could be of use: one for each that runs, and some to be kept.

    0 for a model without. There are a few in any case.
    """
    if model.linear_attention is None:
        return 0
    useful = config.max_num_seqs + max(KEPT_STATES, config.max_num_seqs // 4)
    return max(_MIN_STATES, min(useful, memory_bytes // state_bytes(model, dtype.itemsize)))


def stated_num_blocks(
    model_config: ModelConfig,
    config: EngineConfig,
    kv_dtype: torch.dtype,
    device: torch.device,
    second: SecondModel = NO_SECOND_MODEL,
) -> int | None:
    """How many KV blocks the options ask for; None where what is left of a GPU's memory is to say."""
    if config.num_gpu_blocks_override is not None:
        return config.num_gpu_blocks_override
    if config.kv_cache_memory_bytes is None and device.type == "cuda":
        return None
    stated = config.kv_cache_memory_bytes or DEFAULT_KV_CACHE_BYTES
    return num_blocks_in(stated, model_config, config.block_size, kv_dtype, second.block_bytes)


def measured_caches(
    model: Decoder,
    model_config: ModelConfig,
    config: EngineConfig,
    kv_dtype: torch.dtype,
    device: torch.device,
    second: SecondModel = NO_SECOND_MODEL,
    ranks: Ranks = ALONE,
) -> tuple[int, int]:
    """How many KV blocks the GPU that holds `model`, and a second one's weights, has memory for, and how many states.

    Of all `ranks` the fewest. Raises `ConfigError` where there is no room for any; it is 0 then for the other ranks.
    States, where the model has them, get half of the memory at most.
    """
    use = measure_memory_use(model, model_config, config, kv_dtype, device)
    use = replace(use, graphs=use.graphs + second.graph_bytes)
    state_size = state_bytes(model_config, model.dtype.itemsize)
    least = 2 * (block_bytes(model_config, config.block_size, kv_dtype) + second.block_bytes) + _MIN_STATES * state_size
    try:
        left = use.left_for_kv(config.gpu_memory_utilization, least)
    except ConfigError:
        # They wait to hear of both.
        ranks.least(0)
        ranks.least(0)
        raise
    num_states = ranks.least(num_states_in(left // 2, model_config, config, model.dtype))
    left -= num_states * state_size
    num_blocks = num_blocks_in(left, model_config, config.block_size, kv_dtype, second.block_bytes)
    logger.info("%s for %d KV blocks beside %s and %d states", gib(left), num_blocks, use, num_states)
    return ranks.least(num_blocks), num_states


def measure_memory_use(
    model: Decoder, model_config: ModelConfig, config: EngineConfig, kv_dtype: torch.dtype, device: torch.device
) -> MemoryUse:
    """Run the largest step on the GPU that holds `model`. Raises `ConfigError` where that does not fit."""
    max_model_len = config.longest_sequence(model_config.max_position_embeddings)
    kv_cache = zeros(kv_shape(model_config, NULL_BLOCK + 2, config.block_size), kv_dtype, device)
    states = StateMemory(model_config, 1, model.dtype, device) if model_config.linear_attention else None
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_reserved(device)
    with fitting(f"a step of max_num_batched_tokens={config.max_num_batched_tokens}"):
        step = LargestStep.of(config, max_model_len, device)
        hidden = step.forward(model, kv_cache, states)
        forward_bytes = torch.cuda.max_memory_reserved(device) - before
        step.draw(model, hidden)
        if model.vision is not None:
            model.vision.encode_largest(max_model_len)
        torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    limits = GraphLimits.of(config, model_config, device)
    token_bytes = forward_bytes // len(step.token_ids)
    return MemoryUse(
        total=total,
        peak=torch.cuda.max_memory_reserved(device),
        graphs=graph_bytes(
            config, model_config.num_hidden_layers, len(limits.sizes), forward_bytes=limits.sizes[-1] * token_bytes
        )
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
