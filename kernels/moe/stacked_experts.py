"""The matrices of a mixture's experts side by side in a GPU's memory."""

from dataclasses import dataclass

from torch import Tensor

from ..linear.gates import Gate


@dataclass(frozen=True)
class StackedExperts:
    """Each expert is down(gate(x @ gatesᵀ) * (x @ upᵀ)).

    gate_up: [num_experts, 2 * inner, size], an expert's gates before what they are multiplied with; down:
    [num_experts, size, inner], of the same dtype and on the same device.
    """

    gate_up: Tensor
    down: Tensor
    gate: Gate

    @property
    def num_experts(self) -> int:
        return len(self.down)

    @property
    def inner_size(self) -> int:
        return self.down.shape[2]

    @property
    def matrices(self) -> list[tuple[Tensor, Tensor]]:
        """Of each expert, as parts of these tensors."""
        return list(zip(self.gate_up, self.down, strict=True))
