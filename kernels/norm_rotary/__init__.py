"""RMSNorm and rotary positions, each fused with what stands beside it in a decoder layer."""

from torch import Tensor

from ..device import runs_triton
from ..kv_cache.fp8 import UNSCALED, KVScales
from ..linear.rows import QuantizedRows, RowFormat
from ..native import are_dense, runs_native
from .native import add_rms_norm_native, rms_norm_native, rotate_and_write_native, takes_native_norm
from .reference import (
    add_rms_norm_reference,
    apply_rotary,
    rms_norm_reference,
    rotary_table,
    rotate_and_write_latents_reference,
    rotate_and_write_reference,
)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square normalisation over the last dimension, in float32 (Zhang & Sennrich, arXiv 1910.07467).

    x: [..., size]; weight: [size], of x's dtype, or float32 where x should not be rounded before it is multiplied.
    Returns x's shape and dtype; changes nothing.
    """
    if x.ndim == 2 and takes_native_norm(x, weight):
        return rms_norm_native(x, weight, eps)
    if runs_triton(x):
        from .triton import rms_norm_triton

        return rms_norm_triton(x, weight, eps)
    return rms_norm_reference(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add x to the residual stream, in place, and return the stream normalised as `rms_norm` does.

    x, residual: [num_tokens, size]; weight: [size]. Changes residual alone.
    """
    if runs_native(x, residual) and takes_native_norm(x, weight) and are_dense(x, residual):
        return add_rms_norm_native(x, residual, weight, eps)
    if runs_triton(x):
        from .triton import add_rms_norm_triton

        return add_rms_norm_triton(x, residual, weight, eps)
    return add_rms_norm_reference(x, residual, weight, eps)


def add_rms_norm_quantized(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, row_format: RowFormat
) -> QuantizedRows:
    """As `add_rms_norm`, on a GPU, with the normalised rows in a product's `row_format`."""
    from .triton import add_rms_norm_quantized_triton

    return add_rms_norm_quantized_triton(x, residual, weight, eps, row_format)


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
    kv_scales: KVScales = UNSCALED,
) -> Tensor:
    """From a layer's projections to rotated queries, with rotated keys and values stored in the KV cache.

    qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], queries, then keys, then values. cos, sin:
    [num_tokens, rotary_dim / 2], of qkv's dtype; what a head has beyond `rotary_dim` is not rotated. key_cache,
    value_cache, slots, kv_scales: as `write_kv` has them; both caches are changed in place. query_norm, key_norm:
    [head_dim], the weights of an RMSNorm over each head before it is rotated, both or neither; `eps` is theirs. Returns
    the queries: [num_tokens, num_heads, head_dim].
    """
    norms = () if query_norm is None or key_norm is None else (query_norm, key_norm)
    if (
        runs_native(qkv, cos, sin, key_cache, value_cache)
        and takes_native_norm(qkv, *norms)
        and are_dense(cos, sin, key_cache, value_cache, slots)
    ):
        return rotate_and_write_native(qkv, cos, sin, key_cache, value_cache, slots, query_norm, key_norm, eps)
    if runs_triton(qkv):
        from .triton import rotate_and_write_triton

        return rotate_and_write_triton(
            qkv, cos, sin, key_cache, value_cache, slots, query_norm, key_norm, eps, kv_scales
        )
    return rotate_and_write_reference(
        qkv, cos, sin, key_cache, value_cache, slots, query_norm, key_norm, eps, kv_scales
    )


def rotate_and_write_latents(
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
    """Store latents, each behind an RMSNorm and with a rotated key behind it, and rotate what goes into the queries.

    turned: [num_tokens, num_heads, rotary_dim]; rotated it becomes the last part of `queries`, [num_tokens, num_heads,
    size + rotary_dim], of which nothing else is touched. latents: [num_tokens, size + rotary_dim], each with its key.
    norm: [size]. cos, sin: [num_tokens, rotary_dim / 2], of latents' dtype. cache: [num_blocks, block_size, 1, size +
    rotary_dim], of latents' dtype or in FP8. slots: as `write_kv` has them. Changes `queries` and `cache`.
    """
    if runs_triton(turned):
        from .triton import rotate_and_write_latents_triton

        rotate_and_write_latents_triton(turned, latents, norm, eps, cos, sin, queries, cache, slots)
        return
    rotate_and_write_latents_reference(turned, latents, norm, eps, cos, sin, queries, cache, slots)


__all__ = ["add_rms_norm", "apply_rotary", "rms_norm", "rotary_table", "rotate_and_write", "rotate_and_write_latents"]
