"""Rows in int8, and the obvious torch that the compiled product is compared with."""

import torch
from torch import Tensor

_LARGEST = 127


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Each row as int8 times a scale of its own: symmetric, its largest magnitude becomes 127.

    x: [n, size]. Returns int8 of that shape and float32 scales [n]: zero for a row of zeros, and not finite where the
    row has something that is not, so that what is computed of it is not either.
    """
    x = x.float()
    # Without columns there is nothing to be largest.
    largest = x.abs().amax(-1) if x.shape[-1] else x.new_zeros(len(x))
    # A number over a tensor would multiply by its rounded reciprocal; on a GPU a tensor over a number too.
    most = torch.full_like(largest, _LARGEST)
    factors = (most / largest).clamp(max=torch.finfo(torch.float32).max)
    return (x * factors.unsqueeze(-1)).nan_to_num().round().to(torch.int8), largest / most


def int8_linear_reference(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ (weight * scales)ᵀ + bias with the rows of x in int8; the products' sums are exact.

    x: [n, in]; weight: [out, in] int8; scales: [out] float32; bias: [out] or None. Returns [n, out], of x's dtype.
    """
    quantized, row_scales = quantize_rows(x)
    # float64 holds every sum of products exactly, and has a fast product everywhere.
    sums = (quantized.double() @ weight.double().t()).float()
    product = sums * row_scales.unsqueeze(1) * scales
    return (product if bias is None else product + bias.float()).to(x.dtype)
