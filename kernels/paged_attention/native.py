"""Attention in C++: bfloat16 on a CPU with AVX-512 for it, with AMX where there is; float32 with AVX2 or AVX-512."""

import ctypes
import math

import torch
from torch import Tensor

from ..native import InstructionSet, instruction_set, native_kernel, runs_native
from .metadata import AttentionMetadata

# What the kernels' tiles and buffers are made for.
_HEAD_DIM_UNITS = {torch.bfloat16: 16, torch.float32: 8}
_MAX_HEAD_DIM = 512
_NO_WINDOW = 2**31 - 1


class _Call(ctypes.Structure):
    """The same as `Call` in kernels/native/src/attention_call.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "key_cache", "value_cache", "output")),
        *((name, ctypes.c_void_p) for name in ("query_starts", "context_lens", "block_tables")),
        *((name, ctypes.c_void_p) for name in ("order", "shared_blocks", "sinks")),
        *((name, ctypes.c_int64) for name in ("num_sequences", "max_blocks", "block_bits")),
        *((name, ctypes.c_int64) for name in ("num_heads", "num_kv_heads", "head_dim")),
        *((name, ctypes.c_int64) for name in ("query_token_stride", "query_head_stride")),
        *((name, ctypes.c_int64) for name in ("block_stride", "token_stride", "head_stride")),
        *((name, ctypes.c_int64) for name in ("sliding_window", "uses_avx512", "uses_amx")),
        *((name, ctypes.c_float) for name in ("scale", "soft_cap")),
    )


def takes_native(query: Tensor, key_cache: Tensor, value_cache: Tensor, scale: float) -> bool:
    """Whether the compiled kernel can do this attention."""
    _, block_size, _, head_dim = key_cache.shape
    return (
        runs_native(query, key_cache, value_cache)
        and head_dim % _HEAD_DIM_UNITS[query.dtype] == 0
        and key_cache.stride() == value_cache.stride()
        and key_cache.shape == value_cache.shape
        and head_dim <= _MAX_HEAD_DIM
        and block_size & (block_size - 1) == 0
        and scale > 0
    )


def paged_attention_native(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    instructions: InstructionSet | None = None,
) -> Tensor:
    """See `paged_attention`; `instructions` to compute with, by default all that the processor has."""
    _, block_size, num_kv_heads, head_dim = key_cache.shape
    layout = metadata.native_layout
    instructions = instructions or instruction_set()
    # Four times as fast to make as `torch.empty(query.shape)` is.
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    call = _Call(
        query.data_ptr(),
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        output.data_ptr(),
        *layout.addresses,
        None if sinks is None else sinks.data_ptr(),
        *layout.block_tables.shape,
        block_size.bit_length() - 1,
        query.shape[1],
        num_kv_heads,
        head_dim,
        *query.stride()[:2],
        *key_cache.stride()[:3],
        _NO_WINDOW if sliding_window is None else sliding_window,
        instructions >= InstructionSet.AVX512,
        instructions >= InstructionSet.AMX,
        scale,
        math.inf if soft_cap is None else soft_cap,
    )
    native_kernel("attention", query.dtype)(ctypes.addressof(call))
    return output
