"""The compiled product for float32 on a CPU with AVX2 and no AVX-512, the weight in a layout of its own."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..native import InstructionSet, instruction_set, native_library
from ..weight_memory import empty_weight
from .blocked import BlockedProduct, fits_bfloat16

# Outputs that lie together, how many of them a register holds, and what the number of inputs must be a multiple of.
_BLOCK, _LANES, _DEPTH_STEP = 16, 8, 8


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

    A weight that bfloat16 can hold as it is, such as one that a checkpoint has in bfloat16, is kept in that: half the
    memory, and half of what a decode reads, for the same products. It may be freed afterwards.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        num_outputs, depth = weight.shape
        padded = pad(weight, (0, 0, 0, -num_outputs % _BLOCK))
        packed = _pairs(padded) if fits_bfloat16(weight) else _blocks(padded)
        super().__init__("headrace_float32_product", packed, bias, (num_outputs, depth), torch.float32)


def _blocks(weight: Tensor) -> Tensor:
    """[out, in] to [out / 16, in, 16]."""
    blocks = weight.view(-1, _BLOCK, weight.shape[1]).transpose(1, 2)
    return empty_weight(blocks.shape, weight.dtype, weight.device).copy_(blocks)


def _pairs(weight: Tensor) -> Tensor:
    """[out, in] to [out / 16, in, 8, 2] of bfloat16: each of a block's first eight outputs beside one of the others."""
    pairs = weight.view(-1, 2, _LANES, weight.shape[1]).permute(0, 3, 2, 1)
    return empty_weight(pairs.shape, torch.bfloat16, weight.device).copy_(pairs)
