"""For how many tokens there are CUDA graphs. Free of torch."""

from ..checkpoints.model_config import ModelConfig
from ..checkpoints.model_size import layer_projections
from ..config import EngineConfig

# What small layers reach on a Hopper GPU in a prefill, about: a third of its peak.
HOPPER_FLOPS = 3e14
# Launched one by one: four products, two norms, rotary and cache, attention's three kernels, the activation.
_LAUNCHES_PER_LAYER, _SECONDS_PER_LAUNCH = 11, 1e-5
# The host's other work on a step in which rows come and go, at the least (`benchmarks/bench_scheduler.py`).
_SECONDS_PER_STEP = 1e-3
# Longer steps keep the device busy, but for the smallest models.
_MOST = 2048
# So many graphs are held where there are fewer sizes: of one there are several, as attention launches what it has to.
_LEAST_GRAPHS = 40
# Of the larger graphs each is for at most an eighth more tokens than the one before it, and for whole tiles of rows.
_PARTS, _TILE = 8, 64


def graph_sizes(config: EngineConfig, model: ModelConfig, flops_per_second: float = HOPPER_FLOPS) -> tuple[int, ...]:
    """The numbers of tokens that graphs are for, ascending.

    By default for all steps of decodes, and as far beyond as a step takes the host longer than the device; of a model
    with recurrent states for decodes alone.
    """
    if config.cuda_graph_sizes is not None:
        return tuple(sorted(set(config.cuda_graph_sizes)))
    longest = config.longest_sequence(model.max_position_embeddings)
    room = min(config.max_num_batched_tokens, config.max_num_seqs * longest)
    num_decodes = min(config.max_num_seqs, room)
    if model.linear_attention is not None:
        return default_sizes(num_decodes, num_decodes)
    return default_sizes(num_decodes, min(host_bound_tokens(model, flops_per_second), room))


def default_sizes(num_decodes: int, most: int) -> tuple[int, ...]:
    """Up to `num_decodes`, or to `most` or 2,048 where that is more; close where a step is short."""
    sizes = [size for size in (1, 2, 4, *range(8, 256, 8), *range(256, 512, 16)) if size <= num_decodes]
    for end in (num_decodes, min(most, _MOST)):
        while sizes[-1] < end:
            step = max(8, (1 << sizes[-1].bit_length() - 1) // _PARTS)
            sizes.append(min(sizes[-1] // step * step + step, end))
    return tuple(sizes)


def max_graphs(config: EngineConfig, num_sizes: int) -> int:
    """How many graphs are held at a time: of each size there is room for one.

    Steps with adapters have graphs of their own, for which there is room where it is said that such will come.
    """
    num_kinds = 2 if config.lora_modules else 1
    return max(num_kinds * num_sizes, _LEAST_GRAPHS)


def host_bound_tokens(model: ModelConfig, flops_per_second: float) -> int:
    """Up to how many tokens a step without a graph takes the host longer than the device, in whole tiles."""
    num_layers = model.num_hidden_layers
    weights = sum(each.num_weights for index in range(num_layers) for each in layer_projections(model, index))
    seconds = _SECONDS_PER_STEP + num_layers * _LAUNCHES_PER_LAYER * _SECONDS_PER_LAUNCH
    return -(-int(seconds * flops_per_second / (2 * weights)) // _TILE) * _TILE
