"""What RMSNorm and LayerNorm have in common on the GPU: one program a row."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .launch_sizes import next_power_of_2
from .triton_checks import FLOAT_DTYPES, check_tensor
from .triton_early_launch import early_launch

# A row is one program's registers.
MAX_NORM_SIZE = 65536


def launch_norm(
    kernel: Any,
    x: Tensor,
    residual: Tensor | None,
    factors: Mapping[str, Tensor],
    factor_dtypes: Sequence[torch.dtype],
    eps: float,
) -> Tensor:
    """`kernel` over each row of `x`, [rows, size], which is added to `residual` in place where there is one.

    `factors` by name, each [size], in the order of the kernel's parameters. Raises `ValueError`.
    """
    check_norm(x, residual, factors, factor_dtypes)
    num_rows, size = x.shape
    output = torch.empty(num_rows, size, dtype=x.dtype, device=x.device)
    if not num_rows:
        return output
    padded = next_power_of_2(size)
    kernel[(num_rows,)](
        output,
        x,
        x if residual is None else residual,
        *factors.values(),
        eps,
        size,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        HAS_RESIDUAL=residual is not None,
        PADDED_SIZE=padded,
        num_warps=min(max(padded // 512, 1), 16),
        **early_launch(x.device),
    )
    return output


def check_norm(
    x: Tensor, residual: Tensor | None, factors: Mapping[str, Tensor], factor_dtypes: Sequence[torch.dtype]
) -> None:
    """Raises `ValueError` where something does not fit; see `launch_norm`."""
    check_tensor("x", x, (None, None), FLOAT_DTYPES, x.device, is_contiguous=False)
    if residual is not None:
        check_tensor("residual", residual, x.shape, (x.dtype,), x.device, is_contiguous=False)
    for name, factor in factors.items():
        check_tensor(name, factor, x.shape[1:], factor_dtypes, x.device)
    if x.shape[1] > MAX_NORM_SIZE:
        raise ValueError(f"x {tuple(x.shape)} has rows of {x.shape[1]} numbers; at most {MAX_NORM_SIZE} are supported")
