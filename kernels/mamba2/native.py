"""The compiled kernels: bfloat16 on a CPU with AVX-512 for it, float32 with AVX2 or AVX-512."""

import ctypes

import torch
from torch import Tensor

from ..native import InstructionSet, are_dense, native_kernel, runs_native
from ..recurrent_states.native import uses_avx512

# What the kernels' vectors are made for.
_UNIT = 16


class _NormCall(ctypes.Structure):
    """The same as `GroupedNormCall` in kernels/native/src/gated_norms_call.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "gate", "weight", "output")),
        *((name, ctypes.c_int64) for name in ("num_rows", "num_groups", "size", "gate_stride", "uses_avx512")),
        ("eps", ctypes.c_float),
    )


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
