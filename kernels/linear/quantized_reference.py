"""The obvious torch that the kernels for quantised weights are compared with."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from .int8_reference import quantize_rows
from .weights import Fp4Weight, Int4Weight, ScaledWeight

LARGEST_FP8 = 448.0


def int4_linear_reference(x: Tensor, weight: Int4Weight | Fp4Weight, bias: Tensor | None = None) -> Tensor:
    """x @ weightᵀ + bias, the weight rounded to x's dtype, sums in float32. x: [n, in], inputs in order."""
    product = x.float() @ weight.dequantized(x.dtype).float().t()
    return (product if bias is None else product + bias.float()).to(x.dtype)


def quantize_rows_reference(x: Tensor, dtype: torch.dtype, group_size: int) -> tuple[Tensor, Tensor]:
    """Each group of a row as int8 or float8_e4m3fn times a scale of its own: symmetric, the largest fills the range.

    x: [n, in]. Returns values of that shape and float32 scales [n, num_groups].
    """
    num_rows, num_inputs = x.shape
    group_size = min(group_size, num_inputs)
    num_groups = -(-num_inputs // group_size)
    groups = pad(x, (0, num_groups * group_size - num_inputs)).reshape(-1, group_size)
    values, scales = quantize_rows(groups) if dtype == torch.int8 else _quantize_fp8(groups)
    shaped = values.view(num_rows, num_groups * group_size)[:, :num_inputs]
    return shaped.contiguous(), scales.view(num_rows, num_groups)


def _quantize_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    largest = x.float().abs().amax(-1)
    # Of two tensors, as in `quantize_rows`.
    most = torch.full_like(largest, LARGEST_FP8)
    factors = (most / largest).clamp(max=torch.finfo(torch.float32).max)
    scaled = (x.float() * factors.unsqueeze(-1)).clamp(-LARGEST_FP8, LARGEST_FP8)
    return scaled.to(torch.float8_e4m3fn), largest / most


def scaled_linear_reference(
    values: Tensor, scales: Tensor, weight: ScaledWeight, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """The product of quantised rows with a quantised weight, group by group; sums of products are exact.

    values, scales: as `quantize_rows_reference` gives them. Returns [n, out] of `dtype`.
    """
    product = values.new_zeros(len(values), len(weight.values), dtype=torch.float64)
    for group in range(weight.num_groups):
        part = slice(group * weight.group_size, (group + 1) * weight.group_size)
        sums = values[:, part].double() @ weight.values[:, part].double().t()
        product += sums * scales[:, group, None].double() * weight.scales[group].double()
    return (product if bias is None else product + bias.double()).to(dtype)
