"""The compiled kernels: bfloat16 on a CPU with AVX-512 for it, float32 with AVX2 or AVX-512."""

import ctypes

import torch
from torch import Tensor

from ..native import InstructionSet, are_dense, native_kernel, runs_native
from ..recurrent_states import StateSlots
from ..recurrent_states.native import Places, has_dense_slots, uses_avx512

# What the kernels' vectors and buffers are made for.
_UNIT = 16
_MAX_KEY_DIM = 256


class _RuleCall(ctypes.Structure):
    """The same as `RuleCall` in kernels/native/src/gated_delta_call.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("mixed", "decay", "beta", "decay_scale", "decay_bias")),
        *((name, ctypes.c_void_p) for name in ("states", "output", "starts", "read", "write")),
        *((name, ctypes.c_int64) for name in ("num_sequences", "num_heads", "num_key_heads", "key_dim", "value_dim")),
        *((name, ctypes.c_int64) for name in ("mixed_stride", "decay_stride", "beta_stride", "slot_stride")),
        *((name, ctypes.c_int64) for name in ("uses_avx512", "doubles_beta")),
    )


class _NormCall(ctypes.Structure):
    """The same as `NormCall` in kernels/native/src/gated_norms_call.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "gate", "weight", "output")),
        *((name, ctypes.c_int64) for name in ("num_rows", "num_heads", "size", "gate_stride", "uses_avx512")),
        ("eps", ctypes.c_float),
    )


def takes_native_rule(
    mixed: Tensor, decay: Tensor, beta: Tensor, decay_scale: Tensor, decay_bias: Tensor, states: Tensor
) -> bool:
    """Whether the compiled kernel can do this delta rule."""
    *_, key_dim, value_dim = states.shape
    return (
        runs_native(mixed, decay, beta)
        and runs_native(states, decay_scale, decay_bias)
        and key_dim % _UNIT == 0
        and key_dim <= _MAX_KEY_DIM
        and value_dim % _UNIT == 0
        and has_dense_slots(states)
    )


def gated_delta_rule_native(
    mixed: Tensor,
    decay: Tensor,
    beta: Tensor,
    decay_scale: Tensor,
    decay_bias: Tensor,
    states: Tensor,
    slots: StateSlots,
    instructions: InstructionSet | None = None,
    *,
    doubles_beta: bool = False,
) -> Tensor:
    """See `gated_delta_rule`; `instructions` to compute with, by default all that the processor has."""
    _, num_heads, key_dim, value_dim = states.shape
    output = torch.empty(len(mixed), num_heads, value_dim, dtype=mixed.dtype)
    places = Places(slots)
    call = _RuleCall(
        mixed.data_ptr(),
        decay.data_ptr(),
        beta.data_ptr(),
        decay_scale.data_ptr(),
        decay_bias.data_ptr(),
        states.data_ptr(),
        output.data_ptr(),
        *places.fields,
        num_heads,
        (mixed.shape[1] - num_heads * value_dim) // (2 * key_dim),
        key_dim,
        value_dim,
        mixed.stride(0),
        decay.stride(0),
        beta.stride(0),
        states.stride(0),
        uses_avx512(instructions),
        doubles_beta,
    )
    native_kernel("gated_delta_rule", mixed.dtype)(ctypes.addressof(call))
    return output


def takes_native_norm(x: Tensor, gate: Tensor, weight: Tensor) -> bool:
    """Whether the compiled kernel can do this norm."""
    return runs_native(x, gate, weight) and x.shape[-1] % _UNIT == 0 and are_dense(x)


def gated_rms_norm_native(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, instructions: InstructionSet | None = None
) -> Tensor:
    """See `gated_rms_norm`; `instructions` to compute with, by default all that the processor has."""
    output = torch.empty_like(x)
    call = _NormCall(
        x.data_ptr(),
        gate.data_ptr(),
        weight.data_ptr(),
        output.data_ptr(),
        *x.shape,
        gate.stride(0),
        uses_avx512(instructions),
        eps,
    )
    native_kernel("gated_rms_norm", x.dtype)(ctypes.addressof(call))
    return output
