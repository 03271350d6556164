"""The compiled products with weights of four or eight bits in groups, on a CPU: float32 and, with AVX-512, bfloat16."""

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..native import InstructionSet, instruction_set
from ..weight_memory import empty_weight
from .blocked import BlockedProduct, Call
from .weights import Fp4Weight, Int4Weight, QuantizedWeight, ScaledWeight

# Values are kept unsigned.
_NIBBLE_ZERO, _BYTE_ZERO = 8, 128


class _Call(Call):
    """The same as `Call` in kernels/native/src/grouped_call.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("scales", "zeros")),
        *((name, ctypes.c_int64) for name in ("group_size", "num_bits", "has_minima", "has_half_scales", "has_floats")),
    )


@dataclass(frozen=True)
class _Layout:
    """How a function of kernels/native/src reads the weight: `block` outputs together, and inputs in runs of `run`."""

    kernel: str
    block: int
    run: int

    @property
    def depth_step(self) -> int:
        """What the number of inputs and of those in a group must be a multiple of."""
        return 8 * self.run


_AVX2 = _Layout("headrace_grouped_product", 16, 1)
_AVX512 = {
    torch.float32: _Layout("headrace_packed_float32_grouped_product", 32, 1),
    torch.bfloat16: _Layout("headrace_packed_grouped_product", 32, 2),
}


def supports_grouped(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `GroupedProduct` is there, and the fastest for activations of this dtype, on this processor.

    In bfloat16 AMX multiplies many rows faster by the dequantised weight.
    """
    has_other = dtype == torch.bfloat16 and instruction_set() >= InstructionSet.AMX
    return device.type == "cpu" and not has_other and _layout(dtype) is not None


def can_take_grouped(weight: QuantizedWeight, dtype: torch.dtype) -> bool:
    """Whether `GroupedProduct` can multiply activations of this dtype by this weight, on this processor."""
    if isinstance(weight, ScaledWeight):
        values, num_inputs = weight.values, weight.values.shape[1]
    else:
        values, num_inputs = weight.packed, weight.num_inputs
    layout = _layout(dtype)
    return (
        layout is not None
        and values.device.type == "cpu"
        and values.dtype in (torch.uint8, torch.int8)
        and num_inputs % layout.depth_step == 0
        and (weight.group_size % layout.depth_step == 0 or weight.group_size >= num_inputs)
        and values.numel() > 0
    )


class GroupedProduct(BlockedProduct):
    """x @ weightᵀ + bias. weight: one that `can_take_grouped`; bias: [out] or None. See `BlockedProduct`.

    dtype: of x and of what is returned. instructions: to compute with less than the processor has. The sums are those
    of the product with the dequantised weight, `Float32Product` or `PackedProduct`, bit for bit where float16 holds its
    scales; of more than 4096 inputs they may be of another order, as rows are cut into other parts.
    """

    def __init__(
        self,
        weight: QuantizedWeight,
        bias: Tensor | None,
        dtype: torch.dtype,
        instructions: InstructionSet | None = None,
    ) -> None:
        layout = _layout(dtype, instructions)
        assert layout is not None
        values, zeros, num_bits = _plain(weight)
        num_outputs, depth = values.shape
        scales = weight.wide_scales() if isinstance(weight, Fp4Weight) else weight.scales
        factors = [scales] if zeros is None else [scales, zeros]
        factor_dtype = torch.half if all(map(_is_half, factors)) else torch.float
        # Kept: the call has their addresses alone.
        self._factors = [_blocks(each, factor_dtype, layout) for each in factors]
        self._order = weight.order if isinstance(weight, Int4Weight) else None
        call = _Call(
            scales=self._factors[0].data_ptr(),
            zeros=None if zeros is None else self._factors[1].data_ptr(),
            group_size=min(weight.group_size, depth),
            num_bits=num_bits,
            has_minima=zeros is not None and zeros.is_floating_point(),
            has_half_scales=factor_dtype == torch.half,
            has_floats=isinstance(weight, Fp4Weight),
        )
        lanes = _lanes(values, num_bits, layout)
        super().__init__(layout.kernel, lanes, bias, (num_outputs, depth), dtype, call)

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x if self._order is None else x[:, self._order])


def _layout(dtype: torch.dtype, instructions: InstructionSet | None = None) -> _Layout | None:
    instructions = instructions or instruction_set()
    if instructions is InstructionSet.AVX2:
        return _AVX2 if dtype == torch.float32 else None
    least = InstructionSet.AVX512_BF16 if dtype == torch.bfloat16 else InstructionSet.AVX512
    return _AVX512.get(dtype) if instructions >= least else None


def _plain(weight: QuantizedWeight) -> tuple[Tensor, Tensor | None, int]:
    """Values [out, in] uint8, zeros [groups, out], None where all are in the middle, and the bits of a value."""
    if isinstance(weight, Fp4Weight):
        return weight.unpacked(), None, 4
    if isinstance(weight, Int4Weight):
        is_symmetric = not weight.has_minima and bool((weight.zeros == _NIBBLE_ZERO).all())
        return weight.unpacked(), None if is_symmetric else weight.zeros, 4
    return weight.values.view(torch.uint8) ^ _BYTE_ZERO, None, 8


def _is_half(factors: Tensor) -> bool:
    """Whether float16 holds them as they are."""
    return torch.equal(factors.half().float(), factors.float())


def _blocks(factors: Tensor, dtype: torch.dtype, layout: _Layout) -> Tensor:
    """[groups, out] to [blocks, groups, outputs of a block]."""
    padded = pad(factors.to(dtype), (0, -factors.shape[1] % layout.block))
    blocks = padded.view(len(factors), -1, layout.block).transpose(0, 1)
    return empty_weight(blocks.shape, dtype, factors.device).copy_(blocks)


def _lanes(values: Tensor, num_bits: int, layout: _Layout) -> Tensor:
    """[out, in] uint8 to lanes of four bytes: [blocks, inputs / those of `run` lanes, outputs of a block, run, 4].

    The `run` lanes of an output have inputs in turns, the first in the lowest bits.
    """
    together = 32 // num_bits
    padded = pad(values, (0, 0, 0, -len(values) % layout.block))
    turns = padded.view(-1, layout.block, values.shape[1] // (together * layout.run), together, layout.run)
    lanes = turns.permute(0, 2, 1, 4, 3)
    if num_bits == 4:
        lanes = lanes[..., ::2] | lanes[..., 1::2] << 4
    return empty_weight(lanes.shape, lanes.dtype, lanes.device).copy_(lanes)
