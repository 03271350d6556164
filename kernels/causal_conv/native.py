"""The compiled kernels: bfloat16 on a CPU with AVX-512 for it, float32 with AVX2 or AVX-512."""

import ctypes

import torch
from torch import Tensor

from ..native import InstructionSet, native_kernel, runs_native
from ..recurrent_states import StateSlots
from ..recurrent_states.native import Places, has_dense_slots, uses_avx512

# What the kernels' vectors and buffers are made for.
_UNIT = 16
_MAX_WIDTH = 8


class _ConvCall(ctypes.Structure):
    """The same as `ConvCall` in kernels/native/src/causal_conv_call.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "bias", "states", "output", "starts", "read", "write")),
        *((name, ctypes.c_int64) for name in ("num_sequences", "num_channels", "width")),
        *((name, ctypes.c_int64) for name in ("x_stride", "channel_stride", "tap_stride", "slot_stride")),
        *((name, ctypes.c_int64) for name in ("has_silu", "uses_avx512")),
    )


def takes_native_conv(x: Tensor, weight: Tensor, states: Tensor, bias: Tensor | None = None) -> bool:
    """Whether the compiled kernel can do this convolution."""
    return (
        runs_native(x, states)
        and weight.is_cpu
        and x.shape[1] % _UNIT == 0
        and weight.shape[1] <= _MAX_WIDTH
        and has_dense_slots(states)
        and (bias is None or runs_native(bias))
    )


def causal_conv_native(
    x: Tensor,
    weight: Tensor,
    states: Tensor,
    slots: StateSlots,
    instructions: InstructionSet | None = None,
    *,
    bias: Tensor | None = None,
    silu: bool = True,
) -> Tensor:
    """See `causal_conv`; `instructions` to compute with, by default all that the processor has."""
    output = torch.empty(x.shape, dtype=x.dtype)
    places = Places(slots)
    call = _ConvCall(
        x.data_ptr(),
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        states.data_ptr(),
        output.data_ptr(),
        *places.fields,
        *weight.shape,
        x.stride(0),
        *weight.stride(),
        states.stride(0),
        silu,
        uses_avx512(instructions),
    )
    native_kernel("causal_conv", x.dtype)(ctypes.addressof(call))
    return output
