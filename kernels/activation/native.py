"""The compiled kernels: bfloat16 or float32 on a CPU."""

import torch
from torch import Tensor

from ..native import native_kernel


def silu_and_mul_native(gate_up: Tensor) -> Tensor:
    """See `silu_and_mul`."""
    output, sizes = _output_of(gate_up)
    native_kernel("silu_and_mul", gate_up.dtype)(gate_up.data_ptr(), gate_up.stride(0), output.data_ptr(), *sizes)
    return output


def gelu_tanh_and_mul_native(gate_up: Tensor) -> Tensor:
    """See `gelu_tanh_and_mul`."""
    output, sizes = _output_of(gate_up)
    native_kernel("gelu_tanh_and_mul", gate_up.dtype)(gate_up.data_ptr(), gate_up.stride(0), output.data_ptr(), *sizes)
    return output


def _output_of(gate_up: Tensor) -> tuple[Tensor, tuple[int, int]]:
    sizes = (gate_up.shape[0], gate_up.shape[1] // 2)
    return torch.empty(sizes, dtype=gate_up.dtype), sizes
