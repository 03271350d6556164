"""The compiled product with weights of four or eight bits in groups, for float32 on a CPU with AVX2 and no AVX-512."""

import ctypes

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..native import InstructionSet, instruction_set, native_library
from ..weight_memory import empty_weight
from .blocked import BlockedProduct, Call
from .weights import Int4Weight, QuantizedWeight

# Outputs that lie together, and what the number of inputs and of those in a group must be a multiple of.
_BLOCK, _DEPTH_STEP = 16, 8
# Values are kept unsigned.
_NIBBLE_ZERO, _BYTE_ZERO = 8, 128


class _Call(Call):
    """The same as `Call` in kernels/native/src/grouped_product.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("scales", "zeros")),
        *((name, ctypes.c_int64) for name in ("group_size", "num_bits", "has_minima", "has_half_scales")),
    )


def supports_grouped(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `GroupedProduct` is there, and the fastest for activations of this dtype, on this processor."""
    return dtype == torch.float32 and device.type == "cpu" and instruction_set() is InstructionSet.AVX2


def can_take_grouped(weight: QuantizedWeight) -> bool:
    """Whether `GroupedProduct` can multiply by this weight."""
    values = weight.packed if isinstance(weight, Int4Weight) else weight.values
    num_inputs = weight.num_inputs if isinstance(weight, Int4Weight) else values.shape[1]
    return (
        values.device.type == "cpu"
        and values.dtype in (torch.uint8, torch.int8)
        and num_inputs % _DEPTH_STEP == 0
        and (weight.group_size % _DEPTH_STEP == 0 or weight.group_size >= num_inputs)
        and values.numel() > 0
        and native_library() is not None
    )


class GroupedProduct(BlockedProduct):
    """x @ weightᵀ + bias. weight: one that `can_take_grouped`; bias: [out] or None. See `BlockedProduct`.

    The sums are those of `Float32Product` with the dequantised weight, bit for bit where float16 holds its scales; of
    more than 4096 inputs they may be of another order, as rows are cut into other parts.
    """

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None) -> None:
        values, zeros, num_bits = _plain(weight)
        num_outputs, depth = values.shape
        factors = [weight.scales] if zeros is None else [weight.scales, zeros]
        dtype = torch.half if all(map(_is_half, factors)) else torch.float
        # Kept: the call has their addresses alone.
        self._factors = [_blocks(each, dtype) for each in factors]
        self._order = weight.order if isinstance(weight, Int4Weight) else None
        call = _Call(
            scales=self._factors[0].data_ptr(),
            zeros=None if zeros is None else self._factors[1].data_ptr(),
            group_size=min(weight.group_size, depth),
            num_bits=num_bits,
            has_minima=zeros is not None and zeros.is_floating_point(),
            has_half_scales=dtype == torch.half,
        )
        lanes = _lanes(values, num_bits)
        super().__init__("headrace_grouped_product", lanes, bias, (num_outputs, depth), torch.float32, call)

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x if self._order is None else x[:, self._order])


def _plain(weight: QuantizedWeight) -> tuple[Tensor, Tensor | None, int]:
    """Values [out, in] uint8, zeros [groups, out], None where all are in the middle, and the bits of a value."""
    if isinstance(weight, Int4Weight):
        is_symmetric = not weight.has_minima and bool((weight.zeros == _NIBBLE_ZERO).all())
        return weight.unpacked(), None if is_symmetric else weight.zeros, 4
    return weight.values.view(torch.uint8) ^ _BYTE_ZERO, None, 8


def _is_half(factors: Tensor) -> bool:
    """Whether float16 holds them as they are."""
    return torch.equal(factors.half().float(), factors.float())


def _blocks(factors: Tensor, dtype: torch.dtype) -> Tensor:
    """[groups, out] to [out / 16, groups, 16]."""
    blocks = pad(factors.to(dtype), (0, -factors.shape[1] % _BLOCK)).view(len(factors), -1, _BLOCK).transpose(0, 1)
    return empty_weight(blocks.shape, dtype, factors.device).copy_(blocks)


def _lanes(values: Tensor, num_bits: int) -> Tensor:
    """[out, in] uint8 to [out / 16, in / inputs of a lane, 16, 4]: a lane's four bytes have neighbours' values."""
    padded = pad(values, (0, 0, 0, -len(values) % _BLOCK))
    if num_bits == 4:
        padded = padded[:, ::2] | padded[:, 1::2] << 4
    lanes = padded.view(len(padded) // _BLOCK, _BLOCK, -1, 4).transpose(1, 2)
    return empty_weight(lanes.shape, lanes.dtype, lanes.device).copy_(lanes)
