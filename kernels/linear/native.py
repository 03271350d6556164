"""The compiled kernel for few rows: bfloat16 on a CPU with AMX. It reads the weight as a checkpoint has it."""

import torch
from torch import Tensor

from ..native import InstructionSet, instruction_set, require_native_library

# Up to so many rows it measured faster than oneDNN with a packed weight: 1.4 times with one, alike with 128.
MAX_ROWS = 128
# Rows and columns of the weight that the kernel multiplies at a time, and rows of x.
_BLOCK, _TILE_ROWS = 32, 16


def takes_weight(weight: Tensor) -> bool:
    """Whether `linear_native` can multiply by this weight, on this processor."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and weight.is_contiguous()
        and weight.shape[0] % _BLOCK == 0
        and weight.shape[1] % _BLOCK == 0
        and instruction_set() >= InstructionSet.AMX
    )


def linear_native(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x @ weightᵀ + bias. x: [n, in], its rows evenly apart; weight: one of `takes_weight`. Returns [n, out]."""
    num_rows, (num_outputs, depth) = len(x), weight.shape
    packed = torch.empty(-(-num_rows // _TILE_ROWS) * _TILE_ROWS * depth, dtype=x.dtype)
    output = torch.empty(num_rows, num_outputs, dtype=x.dtype)
    require_native_library().headrace_linear(
        x.data_ptr(),
        x.stride(0),
        weight.data_ptr(),
        bias.data_ptr() if bias is not None else None,
        packed.data_ptr(),
        output.data_ptr(),
        num_rows,
        num_outputs,
        depth,
    )
    return output
