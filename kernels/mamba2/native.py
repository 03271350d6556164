"""The compiled kernels: bfloat16 on a CPU with AVX-512 for it, float32 with AVX2 or AVX-512."""

import ctypes
import math

import torch
from torch import Tensor

from ..native import InstructionSet, are_dense, native_kernel, runs_native
from ..recurrent_states import StateSlots
from ..recurrent_states.native import Places, has_dense_slots, uses_avx512

# What the kernels' vectors and buffers are made for.
_UNIT = 16
_MAX_STATE_DIM = 256


class _ScanCall(ctypes.Structure):
    """The same as `ScanCall` in kernels/native/src/selective_scan_call.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("mixed", "dt", "decay_scale", "dt_bias", "skip")),
        *((name, ctypes.c_void_p) for name in ("states", "output", "starts", "read", "write")),
        *((name, ctypes.c_int64) for name in ("num_sequences", "num_heads", "num_groups", "state_dim", "head_dim")),
        *((name, ctypes.c_int64) for name in ("mixed_stride", "dt_stride", "slot_stride", "uses_avx512")),
        *((name, ctypes.c_float) for name in ("least_step", "greatest_step")),
    )


class _NormCall(ctypes.Structure):
    """The same as `GroupedNormCall` in kernels/native/src/gated_norms_call.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "gate", "weight", "output")),
        *((name, ctypes.c_int64) for name in ("num_rows", "num_groups", "size", "gate_stride", "uses_avx512")),
        ("eps", ctypes.c_float),
    )


def takes_native_scan(
    mixed: Tensor, dt: Tensor, decay_scale: Tensor, dt_bias: Tensor, skip: Tensor, states: Tensor
) -> bool:
    """Whether the compiled kernel can do this scan."""
    *_, state_dim, head_dim = states.shape
    return (
        runs_native(mixed, dt)
        and runs_native(states, decay_scale, dt_bias, skip)
        and state_dim % _UNIT == 0
        and state_dim <= _MAX_STATE_DIM
        and head_dim % _UNIT == 0
        and has_dense_slots(states)
    )


def selective_scan_native(
    mixed: Tensor,
    dt: Tensor,
    decay_scale: Tensor,
    dt_bias: Tensor,
    skip: Tensor,
    states: Tensor,
    slots: StateSlots,
    instructions: InstructionSet | None = None,
    *,
    dt_limits: tuple[float, float] = (0.0, math.inf),
) -> Tensor:
    """See `selective_scan`; `instructions` to compute with, by default all that the processor has."""
    _, num_heads, state_dim, head_dim = states.shape
    output = torch.empty(len(mixed), num_heads, head_dim, dtype=mixed.dtype)
    places = Places(slots)
    call = _ScanCall(
        mixed.data_ptr(),
        dt.data_ptr(),
        decay_scale.data_ptr(),
        dt_bias.data_ptr(),
        skip.data_ptr(),
        states.data_ptr(),
        output.data_ptr(),
        *places.fields,
        num_heads,
        (mixed.shape[1] - num_heads * head_dim) // (2 * state_dim),
        state_dim,
        head_dim,
        mixed.stride(0),
        dt.stride(0),
        states.stride(0),
        uses_avx512(instructions),
        *dt_limits,
    )
    native_kernel("selective_scan", mixed.dtype)(ctypes.addressof(call))
    return output


def takes_native_norm(x: Tensor, gate: Tensor, weight: Tensor, num_groups: int) -> bool:
    """Whether the compiled kernel can do this norm."""
    return runs_native(x, gate, weight) and x.shape[1] % (num_groups * _UNIT) == 0 and are_dense(x)


def grouped_gated_rms_norm_native(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    num_groups: int,
    instructions: InstructionSet | None = None,
) -> Tensor:
    """See `grouped_gated_rms_norm`; `instructions` to compute with, by default all that the processor has."""
    output = torch.empty_like(x)
    num_rows, size = x.shape
    call = _NormCall(
        x.data_ptr(),
        gate.data_ptr(),
        weight.data_ptr(),
        output.data_ptr(),
        num_rows,
        num_groups,
        size // num_groups,
        gate.stride(0),
        uses_avx512(instructions),
        eps,
    )
    native_kernel("grouped_gated_rms_norm", x.dtype)(ctypes.addressof(call))
    return output
