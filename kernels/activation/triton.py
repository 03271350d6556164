"""Gated activations on the GPU: checks, and launches."""

import torch
from torch import Tensor

from ..launch_sizes import cdiv
from ..triton_checks import FLOAT_DTYPES, check_launch, check_tensor
from ..triton_early_launch import early_launch
from .triton_kernels import clamped_kernel, gate_kernel

_COLUMNS_PER_PROGRAM = 1024


def silu_and_mul_triton(gate_up: Tensor) -> Tensor:
    """See `silu_and_mul`."""
    return _gate(gate_up, is_silu=True)


def gelu_tanh_and_mul_triton(gate_up: Tensor) -> Tensor:
    """See `gelu_tanh_and_mul`."""
    return _gate(gate_up, is_silu=False)


def clamped_swiglu_triton(gate_up: Tensor, limit: float, alpha: float) -> Tensor:
    """See `clamped_swiglu`."""
    output = _room(gate_up)
    if output.numel():
        num_rows, size = output.shape
        grid = (num_rows, cdiv(size, _COLUMNS_PER_PROGRAM))
        clamped_kernel[grid](
            output,
            gate_up,
            size,
            gate_up.stride(0),
            limit,
            alpha,
            COLUMNS=_COLUMNS_PER_PROGRAM,
            num_warps=4,
            **early_launch(gate_up.device),
        )
    return output


def _gate(gate_up: Tensor, is_silu: bool) -> Tensor:
    output = _room(gate_up)
    if output.numel():
        num_rows, size = output.shape
        grid = (num_rows, cdiv(size, _COLUMNS_PER_PROGRAM))
        gate_kernel[grid](
            output,
            gate_up,
            size,
            gate_up.stride(0),
            IS_SILU=is_silu,
            COLUMNS=_COLUMNS_PER_PROGRAM,
            num_warps=4,
            **early_launch(gate_up.device),
        )
    return output


def _room(gate_up: Tensor) -> Tensor:
    """For the outputs, once all is well."""
    check_launch("gate_up", gate_up, gate_kernel)
    check_tensor("gate_up", gate_up, (None, None), FLOAT_DTYPES, gate_up.device, is_contiguous=False)
    if gate_up.shape[1] % 2:
        raise ValueError(f"gate_up {tuple(gate_up.shape)} must have an even number of columns, gate and up")
    return torch.empty(len(gate_up), gate_up.shape[1] // 2, dtype=gate_up.dtype, device=gate_up.device)
