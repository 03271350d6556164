"""Rotary frequencies, stretched as the checkpoint says."""

import math

import torch
from torch import Tensor

from ...kernels.norm_rotary import rotary_table
from ..checkpoints.model_shape import QueryGrowth
from ..checkpoints.rope_config import RopeConfig


def rotary_factors(rope: RopeConfig, rotary_dim: int, max_model_len: int) -> Tensor:
    """[2, max_model_len, rotary_dim / 2] float32: what positions are rotated by, cosines and sines."""
    table = rotary_table(inverse_frequencies(rope, rotary_dim, max_model_len), max_model_len)
    return table.mul_(rope.attention_factor)


def query_factors(growth: QueryGrowth, max_model_len: int) -> Tensor | None:
    """[max_model_len] float32: what queries are multiplied by at each position. None: by one at all of them."""
    if max_model_len <= growth.period:
        return None
    periods = torch.arange(max_model_len) // growth.period
    return 1 + growth.beta * torch.log1p(periods.float())


def by_axis(factors: Tensor, axes: Tensor) -> Tensor:
    """Of tokens with a position on each of three axes: each frequency's by its own axis.

    factors: [2, 3, num_tokens, n]. axes: [n] int64. Returns [2, num_tokens, n]. The multimodal rotary embedding of
    Qwen2-VL (arXiv 2409.12191).
    """
    return factors.gather(1, axes.expand(2, 1, factors.shape[2], -1)).squeeze(1)


def inverse_frequencies(rope: RopeConfig, rotary_dim: int, max_model_len: int) -> Tensor:
    """[rotary_dim / 2] float32: how fast each pair of dimensions turns, in radians a position."""
    periods = rope.theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)
    plain = 1.0 / periods
    match rope.rope_type:
        case "default":
            return plain
        case "none":
            # What does not turn is multiplied by one, which changes nothing.
            return torch.zeros_like(plain)
        case "linear":
            return plain / rope.factor
        case "proportional":
            num_turning = int(rope.turning_share * rotary_dim) // 2
            plain[num_turning:] = 0
            return plain / rope.factor
        case "llama3":
            return _llama3(rope, plain)
        case "yarn":
            return _yarn(rope, plain)
        case "longrope":
            # One or the other for all positions: what is in the KV cache cannot be rotated again.
            is_long = max_model_len > rope.original_max_position_embeddings
            return 1.0 / (torch.tensor(rope.long_factor if is_long else rope.short_factor) * periods)


def _llama3(rope: RopeConfig, plain: Tensor) -> Tensor:
    """Llama 3.1's rule: keep fast frequencies, slow the slow ones by `factor`, blend in between."""
    wavelengths = 2 * math.pi / plain
    turns = rope.original_max_position_embeddings / wavelengths
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * plain / rope.factor + blend * plain


def _yarn(rope: RopeConfig, plain: Tensor) -> Tensor:
    """YaRN's rule: the same with a blend that is linear in the dimension."""
    num_frequencies = len(plain)
    first, last = (_dimension_turning(rope, 2 * num_frequencies, turns) for turns in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * num_frequencies - 1)
    # Never a division by zero, as the paper's code has it.
    width = last - first or 0.001
    blend = 1 - ((torch.arange(num_frequencies) - first) / width).clamp(0.0, 1.0)
    return (1 - blend) * plain / rope.factor + blend * plain


def _dimension_turning(rope: RopeConfig, rotary_dim: int, turns: float) -> float:
    """Which pair of dimensions turns so often over the original context."""
    wavelength = rope.original_max_position_embeddings / (2 * math.pi * turns)
    return rotary_dim * math.log(wavelength) / (2 * math.log(rope.theta))
