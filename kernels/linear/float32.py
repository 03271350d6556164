"""The compiled product for float32 on a CPU with AVX2 and no AVX-512, the weight in a layout of its own."""

import torch
from torch import Tensor

from ..native import InstructionSet, instruction_set, native_library
from .blocked import BlockedProduct, float32_blocks

# Outputs that lie together, and what the number of inputs must be a multiple of.
_BLOCK, _DEPTH_STEP = 16, 8


def takes_float32(weight: Tensor) -> bool:
    """Whether `Float32Product` can multiply by this weight, and is the fastest on this processor."""
    return can_take_float32(weight) and instruction_set() is InstructionSet.AVX2


def can_take_float32(weight: Tensor) -> bool:
    """Whether `Float32Product` can multiply by this weight: with AVX-512 `PackedProduct` is the faster one."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and weight.shape[1] % _DEPTH_STEP == 0
        and weight.numel() > 0
        and native_library() is not None
    )


class Float32Product(BlockedProduct):
    """x @ weightᵀ + bias. weight: one that `can_take_float32`, [out, in]; bias: [out] or None. See `BlockedProduct`.

    The weight may be freed afterwards.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        num_outputs, depth = weight.shape
        blocks = float32_blocks(weight, _BLOCK)
        super().__init__("headrace_float32_product", blocks, bias, (num_outputs, depth), torch.float32)
