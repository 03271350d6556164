"""The compiled kernels: bfloat16 on a CPU."""

import torch
from torch import Tensor

from ..native import require_native_library


def rms_norm_native(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `rms_norm`; x is [num_rows, size], its rows evenly apart."""
    num_rows, size = x.shape
    output = torch.empty(num_rows, size, dtype=x.dtype)
    require_native_library().headrace_rms_norm(
        x.data_ptr(), x.stride(0), weight.data_ptr(), output.data_ptr(), num_rows, size, eps
    )
    return output


def add_rms_norm_native(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `add_rms_norm`; x and residual are contiguous and [num_rows, size]."""
    num_rows, size = x.shape
    output = torch.empty_like(x)
    require_native_library().headrace_add_rms_norm(
        x.data_ptr(), residual.data_ptr(), weight.data_ptr(), output.data_ptr(), num_rows, size, eps
    )
    return output
