"""Experts that a checkpoint has stacked: each projection of a layer's experts is one tensor there."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from ...kernels.linear import Linear
from ...kernels.weight_memory import empty_weight
from ..checkpoints.cut import Axes, Axis
from ..checkpoints.model_config import MoeConfig
from ..checkpoints.quantization_schemes import ByteScheme, Mxfp4Scheme
from ..checkpoints.weights import WeightSlot
from ..errors import ModelError
from ..quantization.mxfp4 import StoredMxfp4, blank_mxfp4, mxfp4_exponent
from ..quantization.stored import StoredStackedBytes, blank_stacked_bytes
from .blocks import BlankWeights

# As on disk: outputs before inputs, or behind them.
_OF_MATRICES, _OF_TURNED_MATRICES = Axes(Axis(1), Axis(2)), Axes(Axis(2), Axis(1))


@dataclass(frozen=True)
class StackedExpert:
    """down(activate(gate_up(x))); gates and ups lie as they do on disk."""

    gate_up: Linear
    down: Linear
    activate: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        return self.down.gated(self.activate, self.gate_up(x))


class ExpertMatrices:
    """One projection of each expert: on disk they are one tensor of this name, or in MXFP4 two.

    Outputs come before inputs there where it `has_outputs_first`; else inputs do, but transformers 5 writes some
    families' the other way round.
    """

    def __init__(
        self,
        blank: BlankWeights,
        name: str,
        shape: tuple[int, int, int],
        has_biases: bool,
        has_outputs_first: bool,
    ) -> None:
        """shape: experts, outputs and inputs."""
        quantization, weights = blank.config.quantization, list[Tensor | StoredMxfp4 | StoredStackedBytes]()
        scheme = None if quantization is None else quantization.scheme([blank.prefix + name])
        if isinstance(scheme, Mxfp4Scheme):
            stored = zip(*blank_mxfp4(*shape), strict=True)
            weights += [StoredMxfp4(*each, blank.dtype, blank.device) for each in stored]
        elif isinstance(scheme, ByteScheme) and scheme.scales == "tensor":
            stored = zip(*blank_stacked_bytes(scheme, *shape), strict=True)
            weights += [StoredStackedBytes(*each, blank.dtype, blank.device) for each in stored]
        elif scheme is not None:
            raise ModelError(
                f"{blank.prefix}{name} is quantised: stacked experts are supported with one scale for each"
            )
        else:
            weights += empty_weight(shape, blank.dtype, blank.device)
        self._name, self._has_outputs_first = name, has_outputs_first
        self._scale_name = scheme.scale_name.removeprefix("weight_") if isinstance(scheme, ByteScheme) else ""
        self._biases = torch.empty(shape[:2], dtype=blank.dtype, device=blank.device) if has_biases else None
        biases = [None] * len(weights) if self._biases is None else list(self._biases)
        self.linears = [Linear(weight, bias) for weight, bias in zip(weights, biases, strict=True)]

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        name, held = f"{prefix}.{self._name}", self.linears[0].held
        if isinstance(held, StoredMxfp4):
            yield WeightSlot(f"{name}_blocks", self._of_all(held.blocks))
            # Random bytes are random values, and all these have one size.
            exponent = mxfp4_exponent(held.shape[1] ** -0.5)
            yield WeightSlot(f"{name}_scales", self._of_all(held.exponents), constant=exponent)
        elif isinstance(held, StoredStackedBytes):
            yield WeightSlot(name, self._of_all(held.values), axes=_OF_MATRICES)
            yield WeightSlot(f"{name}_{self._scale_name}", self._of_all(held.scale), constant=1.0)
        elif self._has_outputs_first:
            yield WeightSlot(name, self._of_all(self.linears[0].weight), axes=_OF_MATRICES)
        else:
            stacked = self._of_all(self.linears[0].weight).transpose(1, 2)
            yield WeightSlot(name, stacked, may_be_turned=True, axes=_OF_TURNED_MATRICES)
        if self._biases is not None:
            yield WeightSlot(f"{name}_bias", self._biases)

    def _of_all(self, first: Tensor) -> Tensor:
        """All experts' tensors, of the first one's behind which the others lie.

        Not to be held, so that it is gone once all matrices are packed.
        """
        return first.as_strided((len(self.linears), *first.shape), (first.numel(), *first.stride()))


class StackedMatrices(NamedTuple):
    """Both projections of a mixture's experts: gates and ups, and what takes their products."""

    gate_up: ExpertMatrices
    down: ExpertMatrices

    @classmethod
    def of(cls, blank: BlankWeights, moe: MoeConfig, has_biases: bool = False) -> Self:
        """blank: of the mixture."""
        number, hidden, inner = moe.num_experts, blank.config.hidden_size, moe.intermediate_size
        shapes = ((number, 2 * inner, hidden), (number, hidden, inner))
        return cls(
            *(
                ExpertMatrices(blank, name, shape, has_biases, moe.names.has_outputs_first)
                for name, shape in zip(moe.names.stacked, shapes, strict=True)
            )
        )

    def experts(self, activate: Callable[[Tensor], Tensor]) -> list[StackedExpert]:
        pairs = zip(self.gate_up.linears, self.down.linears, strict=True)
        return [StackedExpert(gate_up, down, activate) for gate_up, down in pairs]

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield from self.gate_up.weight_slots(prefix)
        yield from self.down.weight_slots(prefix)
