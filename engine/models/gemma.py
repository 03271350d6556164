"""The layer of Gemma 2 and 3 and of GLM-4: norms before and after attention, before and after the MLP."""

from collections.abc import Iterator

from torch import Tensor

from ..checkpoints.weights import WeightSlot
from .attention import Attention
from .blocks import BlankWeights, Step
from .layer import DecoderLayer
from .mlp import GatedMlp
from .norms import RmsNorm


class GemmaLayer(DecoderLayer):
    """See `DecoderLayer`."""

    def __init__(self, blank: BlankWeights, index: int, rope: int) -> None:
        config = blank.config
        self._norms = {name: RmsNorm(blank) for name in config.names.layer_norms}
        self.input_norm, self.post_attention_norm, *others = self._norms.values()
        self.mlp_norm, self.post_mlp_norm, *self._further_norms = others
        self.attention = self._new_attention(blank.within("self_attn"), rope, config.sliding_windows[index])
        self.mlp = GatedMlp(blank.within("mlp"), config.intermediate_size, config.names.mlp)

    def _new_attention(self, blank: BlankWeights, rope: int, sliding_window: int | None) -> Attention:
        return Attention(blank, rope, sliding_window)

    def attend(self, branch: Tensor, residual: Tensor, key_cache: Tensor, value_cache: Tensor, step: Step) -> Tensor:
        normed = self.input_norm.of_sum(branch, residual)
        return self.post_attention_norm(self.attention(normed, key_cache, value_cache, step))

    def feed_forward(self, branch: Tensor, residual: Tensor, step: Step) -> Tensor:
        return self.post_mlp_norm(self.mlp(self.mlp_norm.of_sum(branch, residual)))

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        for name, norm in self._norms.items():
            yield from norm.weight_slots(f"{prefix}.{name}")
        yield from self.attention.weight_slots(f"{prefix}.self_attn")
        yield from self.mlp.weight_slots(f"{prefix}.mlp")
