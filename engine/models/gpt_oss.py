"""gpt-oss: Llama's layer with sinks in its attention, and experts that are stacked on disk and have biases."""

from collections.abc import Iterator
from functools import partial

from torch import Tensor

from ...kernels.activation import clamped_swiglu
from ...kernels.moe import ClampedGate, choose_experts
from ..checkpoints.weights import WeightSlot
from .blocks import BlankWeights, linear_slots
from .llama import LlamaLayer
from .moe import Mixture
from .stacked import StackedMatrices


class GptOssLayer(LlamaLayer):
    """See `DecoderLayer`."""

    def _new_mlp(self, blank: BlankWeights, index: int) -> "GptOssExperts":
        return GptOssExperts(blank.within("mlp"))


class GptOssExperts(Mixture):
    """As all mixtures, with a router that has biases, and experts that have them too: gates and ups are in turns."""

    def __init__(self, blank: BlankWeights) -> None:
        config = blank.config
        assert config.moe is not None, "not read as a mixture"
        assert config.gpt_oss is not None, "not read as a gpt-oss"
        self._moe, gate = config.moe, ClampedGate(config.gpt_oss.limit, config.gpt_oss.alpha)
        self._matrices, self._router_name = StackedMatrices.of(blank, config.moe, True), config.moe.names.router
        super().__init__(
            # Small, and a rounding here would change who computes: never in int8.
            blank.linear([self._router_name], [config.moe.num_experts], config.hidden_size, True, quantizable=False),
            self._matrices.experts(partial(clamped_swiglu, limit=gate.limit, alpha=gate.alpha)),
            gate,
        )

    def __call__(self, x: Tensor) -> Tensor:
        # The shares of the chosen among themselves are the softmax of their logits.
        return self.mix(x, *choose_experts(self.router(x), self._moe.num_experts_per_tok, self._moe.norm_topk_prob))

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield from linear_slots(self.router, [f"{prefix}.{self._router_name}"])
        yield from self._matrices.weight_slots(prefix)
