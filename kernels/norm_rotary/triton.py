"""RMSNorm and rotary positions on the GPU: checks, and launches."""

import torch
from torch import Tensor

from ..kv_cache.fp8 import FP8_LARGEST, UNSCALED, KVScales
from ..launch_sizes import cdiv, next_power_of_2
from ..linear.rows import LARGEST, QuantizedRows, RowFormat
from ..triton_checks import FLOAT_DTYPES, check_launch, check_tensor
from ..triton_early_launch import early_launch
from ..triton_norms import check_norm, launch_norm
from .triton_kernels import (
    quantized_norm_kernel,
    rms_norm_kernel,
    rotate_and_write_kernel,
    rotate_latents_kernel,
)

_HEADS_PER_PROGRAM = 8
# Of which no more than what is rotated is read.
_TURNED_HEADS_PER_PROGRAM = 32


def rms_norm_triton(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `rms_norm`."""
    check_launch("x", x, rms_norm_kernel)
    rows = x.reshape(-1, x.shape[-1])
    return _normalise(rows, None, weight, eps).view(x.shape)


def add_rms_norm_triton(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `add_rms_norm`."""
    check_launch("x", x, rms_norm_kernel)
    return _normalise(x, residual, weight, eps)


def _normalise(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    return launch_norm(rms_norm_kernel, x, residual, {"weight": weight}, (x.dtype, torch.float32), eps)


def add_rms_norm_quantized_triton(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, row_format: RowFormat
) -> QuantizedRows:
    """See `add_rms_norm_quantized`."""
    check_launch("x", x, quantized_norm_kernel)
    check_norm(x, residual, {"weight": weight}, (x.dtype, torch.float32))
    num_rows, size = x.shape
    group_size = min(row_format.group_size, size)
    num_groups = cdiv(size, group_size)
    values = torch.empty(num_rows, size, dtype=row_format.dtype, device=x.device)
    scales = torch.empty(num_rows, num_groups, dtype=torch.float32, device=x.device)
    if num_rows:
        groups, padded = next_power_of_2(num_groups), next_power_of_2(group_size)
        quantized_norm_kernel[(num_rows,)](
            values,
            scales,
            x,
            residual,
            weight,
            eps,
            size,
            group_size,
            num_groups,
            x.stride(0),
            residual.stride(0),
            LARGEST=LARGEST[row_format.dtype],
            IS_INT=row_format.dtype == torch.int8,
            GROUPS=groups,
            PADDED_SIZE=padded,
            num_warps=min(max(groups * padded // 512, 1), 16),
            **early_launch(x.device),
        )
    return QuantizedRows(values, scales, x.dtype)


def rotate_and_write_triton(
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
    """See `rotate_and_write`."""
    num_heads = _check(qkv, cos, sin, key_cache, value_cache, slots, query_norm, key_norm)
    num_tokens, (num_kv_heads, head_dim), half = len(qkv), key_cache.shape[2:], cos.shape[1]
    output = torch.empty(num_tokens, num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    if not num_tokens:
        return output
    padded_half = next_power_of_2(half)
    num_chunks = cdiv(num_heads + 2 * num_kv_heads, _HEADS_PER_PROGRAM)
    rotate_and_write_kernel[(num_tokens, num_chunks)](
        output,
        key_cache,
        value_cache,
        qkv,
        cos,
        sin,
        slots,
        cos if query_norm is None else query_norm,
        cos if key_norm is None else key_norm,
        eps,
        kv_scales.key,
        kv_scales.value,
        num_heads,
        num_kv_heads,
        qkv.stride(0),
        key_cache.stride(0),
        key_cache.stride(1),
        key_cache.stride(2),
        HEAD_DIM=head_dim,
        HALF=half,
        PADDED_HALF=padded_half,
        REST=head_dim - 2 * half,
        PADDED_REST=next_power_of_2(max(head_dim - 2 * half, 1)),
        HEADS=_HEADS_PER_PROGRAM,
        # Compiled in: the slot, of 64 bits, would be divided by a subroutine.
        BLOCK_SIZE=key_cache.shape[1],
        HAS_NORM=query_norm is not None,
        LARGEST_FP8=int(FP8_LARGEST.get(key_cache.dtype, 0)),
        # Eight numbers of a half a thread: 16 bytes of 16-bit ones.
        num_warps=max(_HEADS_PER_PROGRAM * padded_half // 256, 1),
        **early_launch(qkv.device),
    )
    return output


def rotate_and_write_latents_triton(
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
    _check_latents(turned, latents, norm, cos, sin, queries, cache, slots)
    (num_tokens, num_heads, _), size, half = turned.shape, len(norm), cos.shape[1]
    if not num_tokens:
        return
    rotate_latents_kernel[(num_tokens, 1 + cdiv(num_heads, _TURNED_HEADS_PER_PROGRAM))](
        queries,
        cache,
        turned,
        latents,
        norm,
        cos,
        sin,
        slots,
        eps,
        num_heads,
        *queries.stride()[:2],
        *turned.stride()[:2],
        latents.stride(0),
        *cache.stride()[:2],
        SIZE=size,
        PADDED_SIZE=next_power_of_2(size),
        HALF=half,
        PADDED_HALF=next_power_of_2(half),
        HEADS=_TURNED_HEADS_PER_PROGRAM,
        # Compiled in: the slot, of 64 bits, would be divided by a subroutine.
        BLOCK_SIZE=cache.shape[1],
        LARGEST_FP8=int(FP8_LARGEST.get(cache.dtype, 0)),
        num_warps=4,
        **early_launch(turned.device),
    )


def _check_latents(
    turned: Tensor,
    latents: Tensor,
    norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    queries: Tensor,
    cache: Tensor,
    slots: Tensor,
) -> None:
    check_launch("turned", turned, rotate_latents_kernel)
    check_tensor("turned", turned, (None, None, None), FLOAT_DTYPES, turned.device, is_contiguous=False)
    (num_tokens, num_heads, rotary_dim), same = turned.shape, ((turned.dtype,), turned.device)
    check_tensor("norm", norm, (None,), (turned.dtype, torch.float32), turned.device)
    row = len(norm) + rotary_dim
    check_tensor("latents", latents, (num_tokens, row), *same, is_contiguous=False)
    check_tensor("cos", cos, (num_tokens, rotary_dim // 2), *same)
    check_tensor("sin", sin, cos.shape, *same)
    check_tensor("queries", queries, (num_tokens, num_heads, row), *same, is_contiguous=False)
    dtypes = (turned.dtype, *FP8_LARGEST)
    check_tensor("cache", cache, (None, None, 1, row), dtypes, turned.device, is_contiguous=False)
    check_tensor("slots", slots, (num_tokens,), (torch.int64,), turned.device)


def _check(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
) -> int:
    """The number of query heads, when all fits together."""
    check_launch("qkv", qkv, rotate_and_write_kernel)
    check_tensor("qkv", qkv, (None, None), FLOAT_DTYPES, qkv.device, is_contiguous=False)
    same = ((qkv.dtype,), qkv.device)
    dtypes = (qkv.dtype, *FP8_LARGEST)
    check_tensor("key_cache", key_cache, (None, None, None, None), dtypes, qkv.device, is_contiguous=False)
    check_tensor("value_cache", value_cache, key_cache.shape, (key_cache.dtype,), qkv.device, is_contiguous=False)
    if key_cache.stride() != value_cache.stride():
        raise ValueError(
            f"value_cache {tuple(value_cache.shape)} has strides {value_cache.stride()}, and must have key_cache's, "
            f"{key_cache.stride()}"
        )
    num_kv_heads, head_dim = key_cache.shape[2:]
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    if qkv.shape[1] % head_dim or num_heads < 1:
        raise ValueError(
            f"qkv {tuple(qkv.shape)} must have columns for at least one query head, {num_kv_heads} key heads and "
            f"{num_kv_heads} value heads of {head_dim}"
        )
    check_tensor("cos", cos, (len(qkv), None), *same)
    if not 0 < 2 * cos.shape[1] <= head_dim:
        raise ValueError(f"cos {tuple(cos.shape)} must have at most half as many columns as a head has, {head_dim}")
    check_tensor("sin", sin, cos.shape, *same)
    check_tensor("slots", slots, (len(qkv),), (torch.int64,), qkv.device)
    if (query_norm is None) != (key_norm is None):
        raise ValueError("query_norm and key_norm must be given both or neither")
    for name, norm in (("query_norm", query_norm), ("key_norm", key_norm)):
        if norm is not None:
            check_tensor(name, norm, (head_dim,), (qkv.dtype, torch.float32), qkv.device)
    return num_heads
