"""MXFP4 as Hugging Face has gpt-oss' experts: blocks of 32 values of four bits, and a scale for each (OCP MX v1.0)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..checkpoints.gguf.blocks import FP4_VALUES, half_powers
from ..checkpoints.weights import WeightSlot

GROUP = 32
_PER_BYTE = 2


@dataclass(frozen=True)
class _PackedSlot(WeightSlot):
    """Of stacked experts' matrices, seen as [num_experts, in, out], a half of what stands for their weights."""

    def check(self, tensor: Tensor) -> None:
        if tuple(tensor.shape) != self._packed_shape:
            raise ValueError(f"shape {tuple(tensor.shape)}; config.json asks for {self._packed_shape}")
        if tensor.dtype != torch.uint8:
            found = str(tensor.dtype).removeprefix("torch.")
            raise ValueError(f"dtype {found}; quantization_config in config.json asks for uint8")

    @property
    def _matrices(self) -> Tensor:
        """[num_experts, out, in], in the memory of the destination."""
        return self.destination.transpose(1, 2)

    @property
    def _packed_shape(self) -> tuple[int, ...]:
        raise NotImplementedError


@dataclass(frozen=True)
class BlocksSlot(_PackedSlot):
    """The values, not yet scaled: `ScalesSlot` is to be filled after it."""

    @property
    def _packed_shape(self) -> tuple[int, ...]:
        experts, num_outputs, num_inputs = self._matrices.shape
        return experts, num_outputs, num_inputs // GROUP, GROUP // _PER_BYTE

    def fill(self, tensor: Tensor) -> None:
        values = FP4_VALUES.to(self.destination.device)
        with torch.no_grad():
            for matrix, packed in zip(self._matrices, tensor, strict=True):
                matrix.copy_(values[_nibbles(packed.to(matrix.device)).int()].view(matrix.shape))


@dataclass(frozen=True)
class ScalesSlot(_PackedSlot):
    """The powers of two that the values are multiplied by; random weights have theirs already."""

    is_drawn: bool = False

    @property
    def _packed_shape(self) -> tuple[int, ...]:
        experts, num_outputs, num_inputs = self._matrices.shape
        return experts, num_outputs, num_inputs // GROUP

    def fill(self, tensor: Tensor) -> None:
        with torch.no_grad():
            for matrix, exponents in zip(self._matrices, tensor, strict=True):
                scales = half_powers(exponents.to(matrix.device)).unsqueeze(-1)
                # In float32, so that float16 rounds but once.
                matrix.copy_((matrix.float().view(*exponents.shape, GROUP) * scales).view(matrix.shape))


def _nibbles(packed: Tensor) -> Tensor:
    """Two values a byte, the lower half first."""
    return torch.stack((packed & 15, packed >> 4), dim=-1)
