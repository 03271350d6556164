"""The obvious torch; also the path that runs where no faster one exists."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square normalisation over the last dimension, in float32 (Zhang & Sennrich, arXiv 1910.07467).

    x: [..., size]; weight: [size]. Returns x's shape and dtype.
    """
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * scaled.to(x.dtype)


def rotary_table(inverse_frequencies: Tensor, num_positions: int) -> Tensor:
    """Cosines and sines of every position's angles.

    inverse_frequencies: [head_dim / 2] float32. Returns [2, num_positions, head_dim / 2] float32.
    """
    positions = torch.arange(num_positions, dtype=torch.float32, device=inverse_frequencies.device)
    angles = torch.outer(positions, inverse_frequencies)
    return torch.stack((angles.cos(), angles.sin()))


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each head's two halves against each other (RoFormer, arXiv 2104.09864, in the half-split layout).

    x: [num_tokens, num_heads, head_dim]; cos, sin: [num_tokens, 1, head_dim / 2] of x's dtype.
    Returns a new tensor like x.
    """
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
