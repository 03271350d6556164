"""The layer of Gemma 2 and 3, of GLM-4 and of LFM3: norms before and after attention, before and after the MLP."""

from torch import Tensor

from .blocks import BlankWeights, Step
from .llama import LlamaLayer


class GemmaLayer(LlamaLayer):
    """See `DecoderLayer`."""

    def __init__(self, blank: BlankWeights, index: int, rope: int) -> None:
        super().__init__(blank, index, rope)
        self.input_norm, self.post_attention_norm, *others = self._norms.values()
        self.mlp_norm, self.post_mlp_norm, *self._further_norms = others

    def attend(self, branch: Tensor, residual: Tensor, key_cache: Tensor, value_cache: Tensor, step: Step) -> Tensor:
        return self.post_attention_norm(super().attend(branch, residual, key_cache, value_cache, step))

    def feed_forward(self, branch: Tensor, residual: Tensor, step: Step) -> Tensor:
        return self.post_mlp_norm(super().feed_forward(branch, residual, step))
