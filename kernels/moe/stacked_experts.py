"""The matrices of a mixture's experts side by side in a GPU's memory, as they are or in fewer bits."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..linear import Fp4Weight, Int4Weight, Linear, ScaledWeight
from ..linear.gates import Gate
from ..linear.weights import FP4_GROUP_SIZE, NVFP4_GROUP_SIZE


@dataclass(frozen=True)
class PlainMatrices:
    """values: [num_experts, out, in] of any float type."""

    values: Tensor

    @property
    def shape(self) -> tuple[int, int, int]:
        """Experts, outputs and inputs."""
        num_experts, num_outputs, num_inputs = self.values.shape
        return num_experts, num_outputs, num_inputs


@dataclass(frozen=True)
class ByteMatrices:
    """As `ScaledWeight`, of each expert. values: [num_experts, out, in]; scales: [num_experts, num_groups, out]."""

    values: Tensor
    scales: Tensor
    group_size: int
    has_blocks: bool = False

    @property
    def shape(self) -> tuple[int, int, int]:
        """Experts, outputs and inputs."""
        num_experts, num_outputs, num_inputs = self.values.shape
        return num_experts, num_outputs, num_inputs

    @property
    def num_groups(self) -> int:
        return self.scales.shape[1]


@dataclass(frozen=True)
class Int4Matrices:
    """As `Int4Weight` with its inputs in order, of each expert.

    packed: [num_experts, ceil(in / 64) * 32, out]; scales, zeros: [num_experts, num_groups, out].
    """

    packed: Tensor
    scales: Tensor
    zeros: Tensor
    group_size: int
    num_inputs: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """Experts, outputs and inputs."""
        return len(self.packed), self.packed.shape[2], self.num_inputs

    @property
    def has_minima(self) -> bool:
        return self.zeros.is_floating_point()


@dataclass(frozen=True)
class Fp4Matrices:
    """As `Fp4Weight`, of each expert.

    packed: as `Int4Matrices` has it; scales: [num_experts, num_groups, out]; factors: [num_experts, out] or None.
    """

    packed: Tensor
    scales: Tensor
    num_inputs: int
    factors: Tensor | None = None
    has_minima: ClassVar[bool] = False

    @property
    def group_size(self) -> int:
        return FP4_GROUP_SIZE if self.factors is None else NVFP4_GROUP_SIZE

    @property
    def shape(self) -> tuple[int, int, int]:
        """Experts, outputs and inputs."""
        return len(self.packed), self.packed.shape[2], self.num_inputs

    @property
    def zeros(self) -> Tensor:
        return self.scales if self.factors is None else self.factors


Matrices = PlainMatrices | ByteMatrices | Int4Matrices | Fp4Matrices


@dataclass(frozen=True)
class ClampedGate:
    """(up + 1) · gate · sigmoid(alpha · gate), of both cut off at `limit`; gates and ups are in turns (gpt-oss)."""

    limit: float
    alpha: float


@dataclass(frozen=True)
class SquaredRelu:
    """relu(up)², of experts that have no gates (Nemotron 3)."""


ExpertGate = Gate | ClampedGate | SquaredRelu


@dataclass(frozen=True)
class StackedExperts:
    """Each expert is down(gate(x @ gatesᵀ) * (x @ upᵀ)), biases added to both products where there are any.

    gate_up: of 2 * inner outputs, an expert's gates before what they are multiplied with, or of `inner` where there are
    no gates; down: of `inner` inputs, and as many outputs as gate_up has inputs. Both are of one kind. biases: of both,
    [num_experts, outputs]; of bytes there are none.
    """

    gate_up: Matrices
    down: Matrices
    gate: ExpertGate
    biases: tuple[Tensor, Tensor] | None = None

    @property
    def num_experts(self) -> int:
        return self.down.shape[0]

    @property
    def inner_size(self) -> int:
        return self.down.shape[2]


class _Kind(NamedTuple):
    layout: type
    dtype: torch.dtype
    has_bias: bool
    group_size: int | None


def stack_experts(gate_up: Sequence[Linear], down: Sequence[Linear], gate: ExpertGate) -> StackedExperts | None:
    """Take the experts' weights, once they are packed: these layers give nothing any more.

    None, and nothing taken, where they are not all of one kind that a kernel takes.
    """
    gate_up_kind, down_kind = _common_kind(gate_up), _common_kind(down)
    if gate_up_kind is None or down_kind is None or gate_up_kind[:3] != down_kind[:3]:
        return None
    biases = None
    if gate_up_kind.has_bias:
        if gate_up_kind.layout is ScaledWeight:
            return None
        biases = _biases(gate_up), _biases(down)
    # One after the other: the first are free before the second are there twice.
    return StackedExperts(_take(gate_up), _take(down), gate, biases)


def _common_kind(layers: Sequence[Linear]) -> _Kind | None:
    kinds = {_kind(each) for each in layers}
    return kinds.pop() if len(kinds) == 1 else None


def _kind(layer: Linear) -> _Kind | None:
    """None: of no kind that is multiplied side by side."""
    weight, has_bias = layer.packed, layer.bias is not None
    match weight:
        case Tensor():
            return _Kind(Tensor, weight.dtype, has_bias, None)
        case ScaledWeight():
            return _Kind(ScaledWeight, weight.values.dtype, has_bias, weight.group_size)
        case Fp4Weight():
            return _Kind(Fp4Weight, weight.scales.dtype, has_bias, None)
        case Int4Weight(order=None):
            return _Kind(Int4Weight, weight.zeros.dtype, has_bias, weight.group_size)
    return None


def _biases(layers: Sequence[Linear]) -> Tensor:
    return torch.stack([each.bias for each in layers if each.bias is not None])


def _take(layers: Sequence[Linear]) -> Matrices:
    stacked = _stack([each.packed for each in layers])
    for each in layers:
        each.release()
    return stacked


def _stack(weights: Sequence[Any]) -> Matrices:
    """Of weights that are of one kind."""
    match weights[0]:
        case ScaledWeight(group_size=group_size):
            have_blocks = all(each.has_blocks for each in weights)
            values, scales = (_side_by_side(weights, name) for name in ("values", "scales"))
            return ByteMatrices(values, scales, group_size, have_blocks)
        case Fp4Weight(num_inputs=num_inputs, factors=factors):
            packed, scales = (_side_by_side(weights, name) for name in ("packed", "scales"))
            return Fp4Matrices(
                packed, scales, num_inputs, factors if factors is None else _side_by_side(weights, "factors")
            )
        case Int4Weight(group_size=group_size, num_inputs=num_inputs):
            packed, scales, zeros = (_side_by_side(weights, name) for name in ("packed", "scales", "zeros"))
            return Int4Matrices(packed, scales, zeros, group_size, num_inputs)
    return PlainMatrices(torch.stack(list(weights)))


def _side_by_side(weights: Sequence[Any], name: str) -> Tensor:
    tensors = [getattr(each, name) for each in weights]
    # Scales of some experts may be in float16, where nothing is lost by it.
    widest = max((each.dtype for each in tensors), key=lambda dtype: dtype.itemsize)
    return torch.stack([each.to(widest) for each in tensors])
