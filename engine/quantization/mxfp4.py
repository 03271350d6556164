"""MXFP4 as Hugging Face has gpt-oss' experts: blocks of 32 values of four bits, and a scale for each (OCP MX v1.0)."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.linear import Fp4Weight
from ..checkpoints.quantization_schemes import MXFP4_GROUP

# The root of the mean square of all sixteen values.
RANDOM_FP4_SIZE = 2.93
_BLOCK_BYTES = MXFP4_GROUP // 2


@dataclass(frozen=True)
class StoredMxfp4:
    """A matrix in MXFP4. See `StoredWeight`; what is read of it goes to `device`.

    blocks: [out, in / 32, 16] uint8, two values a byte, the lower half first; exponents: [out, in / 32] uint8.
    """

    blocks: Tensor
    exponents: Tensor
    dtype: torch.dtype
    device: torch.device

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.blocks), self.blocks.shape[1] * MXFP4_GROUP

    def read(self) -> Fp4Weight:
        """See `StoredWeight`."""
        blocks, exponents = self.blocks.to(self.device), self.exponents.to(self.device)
        return Fp4Weight.pack(fp4_values(blocks).view(self.shape), exponents)


def blank_mxfp4(num_matrices: int, num_outputs: int, num_inputs: int) -> tuple[Tensor, Tensor]:
    """Blocks and exponents of so many matrices, to be filled with a checkpoint's, where it is read."""
    num_blocks = num_inputs // MXFP4_GROUP
    blocks = torch.empty(num_matrices, num_outputs, num_blocks, _BLOCK_BYTES, dtype=torch.uint8)
    return blocks, torch.empty(num_matrices, num_outputs, num_blocks, dtype=torch.uint8)


def mxfp4_exponent(size: float) -> int:
    """The byte of the power of two with which random values are about of this size."""
    return round(math.log2(size / RANDOM_FP4_SIZE)) + 127


def fp4_values(packed: Tensor) -> Tensor:
    """Two values a byte, the lower half first: of [..., n] uint8 [..., 2 * n]."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
