"""The layer of OLMo 2 and 3: norms after attention and MLP, none before. In OLMo Hybrid Llama's are beside it."""

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from ..checkpoints.weights import WeightSlot
from .attention import Attention
from .blocks import BlankWeights, Step
from .layer import DecoderLayer
from .llama import LlamaLayer
from .mlp import GatedMlp
from .norms import RmsNorm


class OlmoLayer(DecoderLayer):
    """See `DecoderLayer`."""

    def __init__(self, blank: BlankWeights, index: int, rope: int) -> None:
        config = blank.config
        self._names = config.names
        self.attention = Attention(blank.within(self._names.attention), rope, config.sliding_windows[index])
        self.attention_norm = RmsNorm(blank)
        self.mlp = GatedMlp(blank.within(self._names.mlp.module), config.intermediate_size, config.names.mlp)
        self.mlp_norm = RmsNorm(blank)

    def attend(self, branch: Tensor, residual: Tensor, key_cache: Tensor, value_cache: Tensor, step: Step) -> Tensor:
        return self.attention_norm(self.attention(residual.add_(branch), key_cache, value_cache, step))

    def feed_forward(self, branch: Tensor, residual: Tensor, step: Step) -> Tensor:
        return self.mlp_norm(self.mlp(residual.add_(branch)))

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        after_attention, after_mlp = self._names.layer_norms
        yield from self.attention.weight_slots(f"{prefix}.{self._names.attention}")
        yield from self.attention_norm.weight_slots(f"{prefix}.{after_attention}")
        yield from self.mlp.weight_slots(f"{prefix}.{self._names.mlp.module}")
        yield from self.mlp_norm.weight_slots(f"{prefix}.{after_mlp}")


def new_olmo_hybrid_layer(blank: BlankWeights, index: int, rope: int) -> DecoderLayer:
    """OLMo's where a layer attends; where it has a state Llama's, whose norms stand before, with names of their own."""
    config = blank.config
    if not config.has_state(index):
        return OlmoLayer(blank, index, rope)
    names = replace(config.names, layer_norms=("attention_layer_norm", "feedforward_layer_norm"))
    return LlamaLayer(replace(blank, config=replace(config, names=names)), index, rope)
