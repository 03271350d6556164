"""LayerNorm on the GPU: checks, and launches."""

import torch
import triton
from torch import Tensor

from ..triton_checks import FLOAT_DTYPES, check_launch, check_tensor
from .triton_kernels import layer_norm_kernel

# A row is one program's registers.
MAX_NORM_SIZE = 65536


def layer_norm_triton(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """See `layer_norm`."""
    check_launch("x", x, layer_norm_kernel)
    rows = x.reshape(-1, x.shape[-1])
    return _normalise(rows, None, weight, bias, eps).view(x.shape)


def add_layer_norm_triton(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """See `add_layer_norm`."""
    check_launch("x", x, layer_norm_kernel)
    check_tensor("residual", residual, x.shape, (x.dtype,), x.device, is_contiguous=False)
    return _normalise(x, residual, weight, bias, eps)


def _normalise(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    check_tensor("x", x, (None, None), FLOAT_DTYPES, x.device, is_contiguous=False)
    for name, factors in (("weight", weight), ("bias", bias)):
        check_tensor(name, factors, x.shape[1:], (x.dtype,), x.device)
    num_rows, size = x.shape
    if size > MAX_NORM_SIZE:
        raise ValueError(f"x {tuple(x.shape)} has rows of {size} numbers; at most {MAX_NORM_SIZE} are supported")
    output = torch.empty(num_rows, size, dtype=x.dtype, device=x.device)
    if not num_rows:
        return output
    padded = triton.next_power_of_2(size)
    layer_norm_kernel[(num_rows,)](
        output,
        x,
        x if residual is None else residual,
        weight,
        bias,
        eps,
        size,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        HAS_RESIDUAL=residual is not None,
        PADDED_SIZE=padded,
        num_warps=min(max(padded // 512, 1), 16),
    )
    return output
