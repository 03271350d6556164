"""Experts that a checkpoint has stacked: each projection of a layer's experts is one tensor there."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.linear import Linear
from ...kernels.weight_memory import empty_weight
from ..checkpoints.cut import Axes, Axis
from ..checkpoints.quantization_config import Mxfp4Scheme
from ..checkpoints.weights import WeightSlot
from ..quantization.mxfp4 import StoredMxfp4, blank_mxfp4, mxfp4_exponent
from .blocks import BlankWeights

# As on disk: inputs before outputs.
_OF_MATRICES = Axes(Axis(2), Axis(1))


@dataclass(frozen=True)
class StackedExpert:
    """down(activate(gate_up(x))); gates and ups lie as they do on disk."""

    gate_up: Linear
    down: Linear
    activate: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        return self.down.gated(self.activate, self.gate_up(x))


def all_experts(first: Tensor, number: int) -> Tensor:
    """All experts' tensors, of the first one's behind which the others lie.

    Not to be held, so that it is gone once all matrices are packed.
    """
    return first.as_strided((number, *first.shape), (first.numel(), *first.stride()))


class ExpertMatrices:
    """One projection of each expert: on disk they are one tensor, with inputs before outputs, or in MXFP4 two.

    transformers 5 writes some families' with outputs before inputs.
    """

    def __init__(
        self, blank: BlankWeights, name: str, num_experts: int, num_outputs: int, num_inputs: int, has_biases: bool
    ) -> None:
        quantization, weights = blank.config.quantization, list[Tensor | StoredMxfp4]()
        if quantization is not None and isinstance(quantization.scheme([blank.prefix + name]), Mxfp4Scheme):
            stored = zip(*blank_mxfp4(num_experts, num_outputs, num_inputs), strict=True)
            weights += [StoredMxfp4(*each, blank.dtype, blank.device) for each in stored]
        else:
            weights += empty_weight((num_experts, num_outputs, num_inputs), blank.dtype, blank.device)
        self._biases = (
            torch.empty(num_experts, num_outputs, dtype=blank.dtype, device=blank.device) if has_biases else None
        )
        biases = [None] * num_experts if self._biases is None else list(self._biases)
        self.linears = [Linear(weight, bias) for weight, bias in zip(weights, biases, strict=True)]

    def weight_slots(self, name: str) -> Iterator[WeightSlot]:
        held = self.linears[0].held
        if isinstance(held, StoredMxfp4):
            yield WeightSlot(f"{name}_blocks", self._of_all(held.blocks))
            # Random bytes are random values, and all these have one size.
            exponent = mxfp4_exponent(held.shape[1] ** -0.5)
            yield WeightSlot(f"{name}_scales", self._of_all(held.exponents), constant=exponent)
        else:
            stacked = self._of_all(self.linears[0].weight).transpose(1, 2)
            yield WeightSlot(name, stacked, may_be_turned=True, axes=_OF_MATRICES)
        if self._biases is not None:
            yield WeightSlot(f"{name}_bias", self._biases)

    def _of_all(self, first: Tensor) -> Tensor:
        return all_experts(first, len(self.linears))
