"""The compiled products on a CPU with AVX-512, in bfloat16 and float32, the weight in a layout of its own."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..native import has_avx512, has_bfloat16
from ..weight_memory import empty_weight
from .blocked import BlockedProduct, fits_bfloat16

# Outputs that lie together, how many of them a register holds, and what the number of inputs must be a multiple of.
_BLOCK, _LANES, _DEPTH_STEP = 32, 16, 8


def takes_packed(weight: Tensor) -> bool:
    """Whether `PackedProduct` can multiply by this weight, on this processor."""
    return (
        weight.device.type == "cpu"
        and (has_bfloat16() if weight.dtype == torch.bfloat16 else weight.dtype == torch.float32 and has_avx512())
        and weight.shape[1] % _DEPTH_STEP == 0
        and weight.numel() > 0
    )


class PackedProduct(BlockedProduct):
    """x @ weightᵀ + bias. weight: one of `takes_packed`, [out, in]; bias: [out] or None. See `BlockedProduct`.

    A weight in float32 that bfloat16 can hold as it is, is kept in that. It may be freed afterwards.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        num_outputs, depth = weight.shape
        kernel, pack = "headrace_packed_float32_product", _blocks
        if weight.dtype == torch.bfloat16:
            kernel, pack = "headrace_packed_product", _pairs_of_inputs
        elif fits_bfloat16(weight):
            pack = _pairs_of_outputs
        packed = pack(pad(weight, (0, 0, 0, -num_outputs % _BLOCK)))
        super().__init__(kernel, packed, bias, (num_outputs, depth), weight.dtype)


def _pairs_of_inputs(weight: Tensor) -> Tensor:
    """[out, in] to [out / 32, in / 2, 32, 2]: of 32 rows two inputs each, then the next two."""
    rows, columns = weight.shape
    return _laid_out(weight.view(rows // _BLOCK, _BLOCK, columns // 2, 2).transpose(1, 2))


def _blocks(weight: Tensor) -> Tensor:
    """[out, in] to [out / 32, in, 32]."""
    return _laid_out(weight.view(-1, _BLOCK, weight.shape[1]).transpose(1, 2))


def _pairs_of_outputs(weight: Tensor) -> Tensor:
    """[out, in] to [out / 32, in, 16, 2] of bfloat16: each of a block's first 16 outputs beside one of the others."""
    pairs = weight.view(-1, 2, _LANES, weight.shape[1]).permute(0, 3, 2, 1)
    return _laid_out(pairs, torch.bfloat16)


def _laid_out(weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return empty_weight(weight.shape, dtype or weight.dtype, weight.device).copy_(weight)
