"""Rotary frequencies, stretched as the checkpoint says."""

import math

import torch
from torch import Tensor

from ..config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """[head_dim / 2] float32: how fast each pair of dimensions turns, in radians a position."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / (rope.theta**exponents)
    if rope.rope_type == "linear":
        return plain / rope.factor
    if rope.rope_type == "llama3":
        return _llama3(rope, plain)
    return plain


def _llama3(rope: RopeConfig, plain: Tensor) -> Tensor:
    """Llama 3.1's rule: keep fast frequencies, slow the slow ones by `factor`, blend in between."""
    wavelengths = 2 * math.pi / plain
    turns = rope.original_max_position_embeddings / wavelengths
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * plain / rope.factor + blend * plain
