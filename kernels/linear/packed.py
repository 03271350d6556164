"""The compiled products on a CPU with AVX-512, in bfloat16 and float32, the weight in a layout of its own."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..native import has_avx512, has_bfloat16
from ..weight_memory import empty_weight
from .blocked import BlockedProduct, float32_blocks

# Outputs that lie together, and what the number of inputs must be a multiple of.
_BLOCK, _DEPTH_STEP = 32, 8


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

    The weight may be freed afterwards.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        num_outputs, depth = weight.shape
        if weight.dtype == torch.bfloat16:
            kernel, packed = "headrace_packed_product", _pairs_of_inputs(weight)
        else:
            kernel, packed = "headrace_packed_float32_product", float32_blocks(weight, _BLOCK)
        super().__init__(kernel, packed, bias, (num_outputs, depth), weight.dtype)


def _pairs_of_inputs(weight: Tensor) -> Tensor:
    """[out, in] to [out / 32, in / 2, 32, 2]: of 32 rows two inputs each, then the next two."""
    padded = pad(weight, (0, 0, 0, -len(weight) % _BLOCK))
    pairs = padded.view(-1, _BLOCK, weight.shape[1] // 2, 2).transpose(1, 2)
    return empty_weight(pairs.shape, weight.dtype, weight.device).copy_(pairs)
