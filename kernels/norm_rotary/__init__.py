"""RMSNorm and rotary positions, each fused with what stands beside it in a decoder layer."""

from torch import Tensor

from ..native import runs_native
from .native import add_rms_norm_native, rms_norm_native
from .reference import (
    add_rms_norm_reference,
    apply_rotary,
    rms_norm_reference,
    rotary_table,
    rotate_and_write_reference,
)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square normalisation over the last dimension, in float32 (Zhang & Sennrich, arXiv 1910.07467).

    x: [..., size]; weight: [size]. Returns x's shape and dtype; changes nothing.
    """
    if x.ndim == 2 and runs_native(x, weight):
        return rms_norm_native(x, weight, eps)
    return rms_norm_reference(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add x to the residual stream, in place, and return the stream normalised as `rms_norm` does.

    x, residual: [num_tokens, size]; weight: [size]. Changes residual alone.
    """
    if x.is_contiguous() and residual.is_contiguous() and runs_native(x, residual, weight):
        return add_rms_norm_native(x, residual, weight, eps)
    return add_rms_norm_reference(x, residual, weight, eps)


def rotate_and_write(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """From a layer's projections to rotated queries, with rotated keys and values stored in the KV cache.

    qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], queries, then keys, then values. cos, sin:
    [num_tokens, head_dim / 2], of qkv's dtype. key_cache, value_cache, slots: as `write_kv` has them; both caches are
    changed in place. query_norm, key_norm: [head_dim], the weights of an RMSNorm over each head before it is
    rotated, both or neither; `eps` is theirs. Returns the queries: [num_tokens, num_heads, head_dim].
    """
    return rotate_and_write_reference(qkv, cos, sin, key_cache, value_cache, slots, query_norm, key_norm, eps)


__all__ = ["add_rms_norm", "apply_rotary", "rms_norm", "rotary_table", "rotate_and_write"]
