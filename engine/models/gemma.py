"""The layer of Gemma 2 and 3 and of GLM-4: norms before and after attention, before and after the MLP."""

from collections.abc import Iterator

from torch import Tensor

from ...kernels.linear import Linear
from ...kernels.norm_rotary import add_rms_norm, rms_norm
from ..checkpoints.weights import WeightSlot
from .blocks import Attention, BlankWeights, Step
from .mlp import GatedMlp


class GemmaLayer:
    """See `DecoderLayer`."""

    mixture = None

    def __init__(self, blank: BlankWeights, index: int, rope: int) -> None:
        config = blank.config
        self._norm_names = config.names.layer_norms
        self._eps = config.rms_norm_eps
        self._norm_offset = config.norm_offset
        self.input_norm = blank.norm(config.hidden_size)
        self.attention = Attention(blank.within("self_attn"), rope, config.sliding_windows[index])
        self.post_attention_norm = blank.norm(config.hidden_size)
        self.mlp_norm = blank.norm(config.hidden_size)
        self.mlp = GatedMlp(blank.within("mlp"), config.intermediate_size, config.names.mlp)
        self.post_mlp_norm = blank.norm(config.hidden_size)

    def attend(self, branch: Tensor, residual: Tensor, key_cache: Tensor, value_cache: Tensor, step: Step) -> Tensor:
        normed = add_rms_norm(branch, residual, self.input_norm, self._eps)
        attended = self.attention(normed, key_cache, value_cache, step)
        return rms_norm(attended, self.post_attention_norm, self._eps)

    def feed_forward(self, branch: Tensor, residual: Tensor) -> Tensor:
        normed = add_rms_norm(branch, residual, self.mlp_norm, self._eps)
        return rms_norm(self.mlp(normed), self.post_mlp_norm, self._eps)

    def projections(self) -> Iterator[Linear]:
        yield from self.attention.projections()
        yield from self.mlp.projections()

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        norms = (self.input_norm, self.post_attention_norm, self.mlp_norm, self.post_mlp_norm)
        for name, norm in zip(self._norm_names, norms, strict=True):
            yield WeightSlot(f"{prefix}.{name}.weight", norm, self._norm_offset)
        yield from self.attention.weight_slots(f"{prefix}.self_attn")
        yield from self.mlp.weight_slots(f"{prefix}.mlp")
