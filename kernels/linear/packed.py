"""The compiled product for bfloat16 on a CPU with AVX-512 and no AMX, the weight in a layout of its own."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..native import InstructionSet, instruction_set
from ..weight_memory import empty_weight
from .blocked import BlockedProduct

# Outputs that lie together, and what the number of inputs must be a multiple of.
_BLOCK, _DEPTH_STEP = 32, 8


def takes_packed(weight: Tensor) -> bool:
    """Whether `PackedProduct` can multiply by this weight, on this processor."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and weight.shape[1] % _DEPTH_STEP == 0
        and instruction_set() >= InstructionSet.AVX512_BF16
    )


class PackedProduct(BlockedProduct):
    """x @ weightᵀ + bias. weight: one of `takes_packed`, [out, in]; bias: [out] or None. See `BlockedProduct`.

    The weight may be freed afterwards.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        num_outputs, depth = weight.shape
        packed = _pairs(pad(weight, (0, 0, 0, -num_outputs % _BLOCK)))
        super().__init__("headrace_packed_product", packed, bias, (num_outputs, depth), torch.bfloat16)


def _pairs(weight: Tensor) -> Tensor:
    """[out, in] to [out / 32, in / 2, 32, 2]: of 32 rows two inputs each, then the next two."""
    rows, columns = weight.shape
    paired = weight.view(rows // _BLOCK, _BLOCK, columns // 2, 2).transpose(1, 2)
    return empty_weight(paired.shape, weight.dtype, weight.device).copy_(paired)
