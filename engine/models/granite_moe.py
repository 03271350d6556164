"""The mixture of Granite 3: experts that are stacked on disk, outputs before inputs, without biases."""

from collections.abc import Iterator

from torch import Tensor

from ...kernels.linear import Linear
from ...kernels.linear.gates import GATES
from ...kernels.moe import choose_experts
from ...kernels.weight_memory import empty_weight
from ..checkpoints.cut import Axes, Axis
from ..checkpoints.model_config import MoeConfig
from ..checkpoints.weights import WeightSlot
from .blocks import BlankWeights, linear_slots
from .mlp import ACTIVATIONS
from .moe import Mixture
from .stacked import StackedExpert, all_experts

_OF_MATRICES = Axes(Axis(1), Axis(2))


class GraniteExperts(Mixture[StackedExpert]):
    """As all mixtures; the shares of the chosen among themselves are the softmax of their logits."""

    name = "block_sparse_moe"

    def __init__(self, blank: BlankWeights, moe: MoeConfig) -> None:
        self._moe, self._ranks = moe, blank.ranks
        number, hidden_size, inner_size = moe.num_experts, blank.config.hidden_size, moe.intermediate_size
        gate_up = empty_weight((number, 2 * inner_size, hidden_size), blank.dtype, blank.device)
        down = empty_weight((number, hidden_size, inner_size), blank.dtype, blank.device)
        activate = ACTIVATIONS[blank.config.activation]
        super().__init__(
            # Small, and a rounding here would change who computes: never in int8.
            blank.within(self.name).linear(["router.layer"], [number], hidden_size, quantizable=False),
            [
                StackedExpert(Linear(first), Linear(second), activate)
                for first, second in zip(gate_up, down, strict=True)
            ],
            GATES[activate],
        )

    def __call__(self, x: Tensor) -> Tensor:
        chosen = choose_experts(self.router(x), self._moe.num_experts_per_tok, self._moe.norm_topk_prob)
        return self._ranks.sum(self.mix(x, *chosen))

    def projections(self) -> Iterator[Linear]:
        yield self.router
        for expert in self.experts:
            yield expert.gate_up
            yield expert.down

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield from linear_slots(self.router, [f"{prefix}.router.layer"])
        first, number = self.experts[0], len(self.experts)
        for name, linear in (("input_linear", first.gate_up), ("output_linear", first.down)):
            yield WeightSlot(f"{prefix}.{name}.weight", all_experts(linear.weight, number), axes=_OF_MATRICES)
