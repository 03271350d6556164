"""The compiled kernels: bfloat16 or float32 on a CPU."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..native import native_kernel, runs_native


def takes_native_norm(x: Tensor, *weights: Tensor) -> bool:
    """Whether the compiled kernels can normalise x with these weights, of its dtype or float32."""
    if weights and weights[0].dtype == torch.float32:
        return runs_native(x) and runs_native(*weights)
    return runs_native(x, *weights)


def rms_norm_native(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `rms_norm`; x is [num_rows, size], its rows evenly apart."""
    num_rows, size = x.shape
    output = torch.empty(num_rows, size, dtype=x.dtype)
    _kernel("rms_norm", x, weight)(x.data_ptr(), x.stride(0), weight.data_ptr(), output.data_ptr(), num_rows, size, eps)
    return output


def add_rms_norm_native(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `add_rms_norm`; x and residual are contiguous and [num_rows, size]."""
    num_rows, size = x.shape
    output = torch.empty_like(x)
    _kernel("add_rms_norm", x, weight)(
        x.data_ptr(), residual.data_ptr(), weight.data_ptr(), output.data_ptr(), num_rows, size, eps
    )
    return output


def rotate_and_write_native(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    eps: float,
) -> Tensor:
    """See `rotate_and_write`; cos, sin, slots and the caches are contiguous. Rounds once, after the rotation."""
    num_tokens, (num_kv_heads, head_dim) = len(qkv), key_cache.shape[2:]
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    query = torch.empty(num_tokens, num_heads, head_dim, dtype=qkv.dtype)
    _kernel("rotate_and_write", qkv, query_norm)(
        qkv.data_ptr(),
        qkv.stride(0),
        cos.data_ptr(),
        sin.data_ptr(),
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        slots.data_ptr(),
        query_norm.data_ptr() if query_norm is not None else None,
        key_norm.data_ptr() if key_norm is not None else None,
        eps,
        query.data_ptr(),
        num_tokens,
        num_heads,
        num_kv_heads,
        head_dim,
        cos.shape[1],
    )
    return query


def _kernel(name: str, x: Tensor, weight: Tensor | None) -> Callable[..., None]:
    is_wide = weight is not None and weight.dtype != x.dtype
    return native_kernel(f"wide_{name}" if is_wide else name, x.dtype)
