"""Weights in fewer bits than the activations have: the layouts that the kernels read."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

# So many inputs lie in the low halves of a tile's bytes, and the next so many in the high ones.
HALF_TILE = 32
# The size of groups that the kernel for scaled bytes takes, beside one group of all.
KERNEL_GROUP_SIZE = 128
# So many outputs have one scale in checkpoints whose scales are of blocks.
BLOCK_OUTPUTS = 128
# Inputs that share a power of two in MXFP4, and a scale in NVFP4.
FP4_GROUP_SIZE, NVFP4_GROUP_SIZE = 32, 16
_FP4_VALUES = torch.tensor((0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6))


@dataclass(frozen=True)
class Int4Weight:
    """Four bits a weight: (value - zero) * scale, with a scale and a zero for each group of inputs and each output.

    Where zeros are floats they are minima, and a weight is value * scale - zero.

    packed: [ceil(in / 64) * 32, out] uint8. Byte [32 * i + j, n] holds the value of place 64 * i + j in its low half
    and that of place 64 * i + 32 + j in its high half, so a tile of bytes is two tiles of values and nothing is
    shuffled. scales: [num_groups, out] of any float type; zeros: [num_groups, out] uint8, up to 16, or of any float
    type. Places are grouped by `group_size`, a multiple of 32 or not less than their number. order: [in] int64, the
    input at each place, or None where they are in order.
    """

    packed: Tensor
    scales: Tensor
    zeros: Tensor
    group_size: int
    num_inputs: int
    order: Tensor | None = None

    def __post_init__(self) -> None:
        if self.group_size < self.num_inputs and (self.group_size < 1 or self.group_size % HALF_TILE):
            raise ValueError(
                f"group_size {self.group_size} must be a multiple of {HALF_TILE}, or {self.num_inputs}, all inputs"
            )

    @classmethod
    def pack(
        cls, values: Tensor, scales: Tensor, zeros: Tensor, group_size: int, order: Tensor | None = None
    ) -> "Int4Weight":
        """values: [out, in] uint8 below 16, at their places; the rest as the class has it."""
        packed, num_inputs = _pack(values), values.shape[1]
        return cls(packed, scales.contiguous(), zeros.contiguous(), group_size, num_inputs, order)

    @property
    def has_minima(self) -> bool:
        return self.zeros.is_floating_point()

    @property
    def num_outputs(self) -> int:
        return self.packed.shape[1]

    def with_outputs(self, order: Tensor) -> "Int4Weight":
        """A weight of these outputs, in this order: [n] int64."""
        packed, scales, zeros = (each[:, order].contiguous() for each in (self.packed, self.scales, self.zeros))
        return replace(self, packed=packed, scales=scales, zeros=zeros)

    def unpacked(self) -> Tensor:
        """The values at their places: [out, in] uint8."""
        return _unpack(self.packed, self.num_inputs)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The weight itself, inputs in order: [out, in]. Computed in float32 and rounded once."""
        group = torch.arange(self.num_inputs, device=self.packed.device) // self.group_size
        values, scales, zeros = (
            self.unpacked().float(),
            self.scales.float().t()[:, group],
            self.zeros.float().t()[:, group],
        )
        placed = (values * scales - zeros if self.has_minima else (values - zeros) * scales).to(dtype)
        if self.order is None:
            return placed
        ordered = torch.empty_like(placed)
        ordered[:, self.order] = placed
        return ordered


@dataclass(frozen=True)
class Fp4Weight:
    """Four bits a weight, a float of E2M1, times a scale for each group of inputs and each output.

    In MXFP4 (OCP MX 1.0) 32 inputs are a group, and scales powers of two; in NVFP4 16, and scales are 8-bit floats that
    each output has a factor for. packed: as `Int4Weight` has it; scales: [num_groups, out] bfloat16, or with factors
    the bytes of float8_e4m3fn; factors: [out] float32, None in MXFP4. `zeros`: what kernels are given in the place of
    these, which there are none of: the factors, if there are any.
    """

    packed: Tensor
    scales: Tensor
    num_inputs: int
    factors: Tensor | None = None
    has_minima: ClassVar[bool] = False

    @classmethod
    def pack(cls, values: Tensor, exponents: Tensor) -> "Fp4Weight":
        """values: [out, in] uint8 below 16; exponents: [out, in / 32] uint8, 127 for one."""
        # In float64, as the smallest has less than float32's exponents.
        scales = torch.exp2(exponents.double() - 127).to(torch.bfloat16)
        return cls(_pack(values), scales.t().contiguous(), values.shape[1])

    @classmethod
    def pack_nvfp4(cls, values: Tensor, scales: Tensor, factors: Tensor) -> "Fp4Weight":
        """values: [out, in] uint8 below 16; scales: [out, in / 16] float8_e4m3fn; factors: [out] float32."""
        return cls(_pack(values), scales.view(torch.uint8).t().contiguous(), values.shape[1], factors)

    @property
    def num_outputs(self) -> int:
        return self.packed.shape[1]

    @property
    def group_size(self) -> int:
        return FP4_GROUP_SIZE if self.factors is None else NVFP4_GROUP_SIZE

    @property
    def zeros(self) -> Tensor:
        return self.scales if self.factors is None else self.factors

    def with_outputs(self, order: Tensor) -> "Fp4Weight":
        """A weight of these outputs, in this order: [n] int64."""
        packed, scales = (each[:, order].contiguous() for each in (self.packed, self.scales))
        return replace(
            self, packed=packed, scales=scales, factors=None if self.factors is None else self.factors[order]
        )

    def wide_scales(self) -> Tensor:
        """What values are multiplied by: [num_groups, out] float32."""
        if self.factors is None:
            return self.scales.float()
        return self.scales.view(torch.float8_e4m3fn).float() * self.factors

    def unpacked(self) -> Tensor:
        """The values' bits at their places: [out, in] uint8."""
        return _unpack(self.packed, self.num_inputs)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The weight itself: [out, in]. Computed in float32 and rounded once."""
        values = _FP4_VALUES.to(self.packed.device)[self.unpacked().int()]
        scales = self.wide_scales().repeat_interleave(self.group_size, dim=0)[: self.num_inputs]
        return (values * scales.t()).to(dtype)


def _pack(values: Tensor) -> Tensor:
    """[out, in] uint8 below 16 to [ceil(in / 64) * 32, out]: see `Int4Weight`."""
    num_outputs, num_inputs = values.shape
    tiles = pad(values, (0, -num_inputs % (2 * HALF_TILE))).view(num_outputs, -1, 2, HALF_TILE)
    return (tiles[:, :, 0] | tiles[:, :, 1] << 4).reshape(num_outputs, -1).t().contiguous()


def _unpack(packed: Tensor, num_inputs: int) -> Tensor:
    num_outputs = packed.shape[1]
    tiles = packed.t().reshape(num_outputs, -1, HALF_TILE)
    values = torch.stack((tiles & 15, tiles >> 4), dim=2)
    return values.reshape(num_outputs, -1)[:, :num_inputs]


@dataclass(frozen=True)
class ScaledWeight:
    """A byte a weight: value * scale, with a scale for each group of inputs and each output.

    values: [out, in] int8 or float8_e4m3fn; scales: [num_groups, out] float32; inputs are grouped by `group_size`,
    and all are one group where that is `in`. has_blocks: whether it is known that 128 outputs after each other, from
    the first on, have one scale in each group, as DeepSeek's have.
    """

    values: Tensor
    scales: Tensor
    group_size: int
    has_blocks: bool = False

    @property
    def num_groups(self) -> int:
        return len(self.scales)

    def with_outputs(self, order: Tensor) -> "ScaledWeight":
        """A weight of these outputs, in this order: [n] int64."""
        # Few devices look 8-bit floats up.
        values = self.values.view(torch.uint8)[order].view(self.values.dtype)
        return replace(self, values=values, scales=self.scales[:, order].contiguous(), has_blocks=False)

    def with_known_blocks(self) -> "ScaledWeight":
        """The same, and whether it `has_blocks`: where it is on a GPU, that is waited for."""
        if self.num_groups == 1:
            return self
        padded = pad(self.scales, (0, -self.scales.shape[1] % BLOCK_OUTPUTS), mode="replicate")
        blocks = padded.view(self.num_groups, -1, BLOCK_OUTPUTS)
        return replace(self, has_blocks=bool((blocks == blocks[..., :1]).all()))

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The weight itself: [out, in]. Computed in float32 and rounded once."""
        group = torch.arange(self.values.shape[1], device=self.values.device) // self.group_size
        return (self.values.float() * self.scales.t()[:, group]).to(dtype)


QuantizedWeight = Int4Weight | Fp4Weight | ScaledWeight
