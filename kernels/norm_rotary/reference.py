"""The obvious torch; also the path that runs where no faster one exists."""

import torch
from torch import Tensor

from ..kv_cache import write_kv
from ..kv_cache.fp8 import UNSCALED, KVScales
from ..kv_cache.reference import store_rows


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `rms_norm`."""
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (weight * scaled.to(weight.dtype)).to(x.dtype)


def add_rms_norm_reference(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `add_rms_norm`."""
    return rms_norm_reference(residual.add_(x), weight, eps)


def rotate_and_write_reference(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    eps: float,
    kv_scales: KVScales = UNSCALED,
) -> Tensor:
    """See `rotate_and_write`."""
    num_kv_heads, head_dim = key_cache.shape[2:]
    heads = qkv.view(len(qkv), qkv.shape[1] // head_dim, head_dim)
    query, key, value = heads.split_with_sizes([heads.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads], dim=1)
    if query_norm is not None and key_norm is not None:
        query = rms_norm_reference(query, query_norm, eps)
        key = rms_norm_reference(key, key_norm, eps)
    write_kv(apply_rotary(key, cos, sin), value, key_cache, value_cache, slots, kv_scales)
    return apply_rotary(query, cos, sin)


def rotate_and_write_latents_reference(
    turned: Tensor,
    latents: Tensor,
    norm: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    queries: Tensor,
    cache: Tensor,
    slots: Tensor,
) -> None:
    """See `rotate_and_write_latents`."""
    size = len(norm)
    queries[..., size:] = apply_rotary(turned, cos, sin)
    keys = apply_rotary(latents[:, size:].unsqueeze(1), cos, sin).squeeze(1)
    rows = torch.cat((rms_norm_reference(latents[:, :size], norm, eps), keys), dim=1)
    store_rows(rows.unsqueeze(1), cache, slots)


def rotary_table(inverse_frequencies: Tensor, num_positions: int) -> Tensor:
    """Cosines and sines of every position's angles.

    inverse_frequencies: [rotary_dim / 2] float32. Returns [2, num_positions, rotary_dim / 2] float32.
    """
    positions = torch.arange(num_positions, dtype=torch.float32, device=inverse_frequencies.device)
    angles = torch.outer(positions, inverse_frequencies)
    return torch.stack((angles.cos(), angles.sin()))


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each head's two halves against each other (RoFormer, arXiv 2104.09864, in the half-split layout).

    x: [num_tokens, num_heads, head_dim]; cos, sin: [num_tokens, rotary_dim / 2] of x's dtype. What a head has beyond
    its first `rotary_dim` elements stays as it is. Returns a new tensor like x.
    """
    half = cos.shape[-1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second, unturned = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, unturned), dim=-1)
