"""For how many tokens there are CUDA graphs. Free of torch."""

from ..checkpoints.model_config import ModelConfig
from ..checkpoints.model_size import layer_projections
from ..config import EngineConfig

# What small layers reach on a Hopper GPU in a prefill, about: a third of its peak.
HOPPER_FLOPS = 3e14
# Launched one by one: four products, two norms, rotary and cache, attention's three kernels, the activation. Steps
# of 24 layers took the host of an H200 16 ms less with a graph.
_LAUNCHES_PER_LAYER, _SECONDS_PER_LAUNCH = 11, 5e-5
# The host's other work on a step of prompts that come and rows that go, at the most (`benchmarks/bench_scheduler.py`).
_SECONDS_PER_STEP = 5e-3
# A host that takes nearly as long as the device falls behind it whenever it is disturbed.
_MARGIN = 1.5
# Longer steps keep the device busy, but for the smallest models.
_MOST = 8192
# So many graphs are held where there are fewer sizes: of one there are several, as attention launches what it has to.
_LEAST_GRAPHS = 40
# Of the larger graphs each is for at most an eighth more tokens than the one before it, and for whole tiles of rows; of
# the largest for a quarter, as most steps of so many are as full as may be.
_PARTS, _PARTS_OF_LARGEST, _LARGEST, _TILE = 8, 4, 2048, 64


def graph_sizes(config: EngineConfig, model: ModelConfig, flops_per_second: float = HOPPER_FLOPS) -> tuple[int, ...]:
    """The numbers of tokens that graphs are for, ascending.

    By default for all steps of decodes, and as far beyond as a step takes the host about as long as the device; of a
    model with recurrent states for decodes alone.
    """
    if config.cuda_graph_sizes is not None:
        return tuple(sorted(set(config.cuda_graph_sizes)))
    longest = config.longest_sequence(model.max_position_embeddings)
    room = min(config.max_num_batched_tokens, config.max_num_seqs * longest)
    num_decodes = min(config.max_num_seqs, room)
    if model.state_layers is not None:
        return default_sizes(num_decodes, num_decodes)
    return default_sizes(num_decodes, min(host_bound_tokens(model, flops_per_second), room))


def default_sizes(num_decodes: int, most: int) -> tuple[int, ...]:
    """Up to `num_decodes`, or to `most` or 8,192 where that is more; close where a step is short."""
    sizes = [size for size in (1, 2, 4, *range(8, 256, 8), *range(256, 512, 16)) if size <= num_decodes]
    for end in (num_decodes, min(most, _MOST)):
        while sizes[-1] < end:
            parts = _PARTS if sizes[-1] < max(_LARGEST, num_decodes) else _PARTS_OF_LARGEST
            step = max(8, (1 << sizes[-1].bit_length() - 1) // parts)
            sizes.append(min(sizes[-1] // step * step + step, end))
    return tuple(sizes)


def max_graphs(config: EngineConfig, num_sizes: int) -> int:
    """How many graphs are held at a time: of each size there is room for one.

    Steps with adapters have graphs of their own, for which there is room where it is said that such will come.
    """
    num_kinds = 2 if config.lora_modules else 1
    return max(num_kinds * num_sizes, _LEAST_GRAPHS)


def host_bound_tokens(model: ModelConfig, flops_per_second: float) -> int:
    """Up to how many tokens a step without a graph takes the host about as long as the device, in whole tiles."""
    num_layers = model.num_hidden_layers
    weights = sum(each.num_weights for index in range(num_layers) for each in layer_projections(model, index))
    seconds = _MARGIN * (_SECONDS_PER_STEP + num_layers * _LAUNCHES_PER_LAYER * _SECONDS_PER_LAUNCH)
    return -(-int(seconds * flops_per_second / (2 * weights)) // _TILE) * _TILE
