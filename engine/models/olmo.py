"""The layer of OLMo 2 and 3: norms after attention and MLP, none before."""

from collections.abc import Iterator

from torch import Tensor

from ...kernels.linear import Linear
from ...kernels.norm_rotary import rms_norm
from ..checkpoints.weights import WeightSlot
from .blocks import Attention, BlankWeights, Step
from .mlp import GatedMlp


class OlmoLayer:
    """See `DecoderLayer`."""

    mixture = None

    def __init__(self, blank: BlankWeights, index: int, rope: int) -> None:
        config = blank.config
        self._eps = config.rms_norm_eps
        self._norm_names = config.names.layer_norms
        self.attention = Attention(blank.within("self_attn"), rope, config.sliding_windows[index])
        self.attention_norm = blank.norm(config.hidden_size)
        self.mlp = GatedMlp(blank.within("mlp"), config.intermediate_size, config.names.mlp)
        self.mlp_norm = blank.norm(config.hidden_size)

    def attend(self, branch: Tensor, residual: Tensor, key_cache: Tensor, value_cache: Tensor, step: Step) -> Tensor:
        attended = self.attention(residual.add_(branch), key_cache, value_cache, step)
        return rms_norm(attended, self.attention_norm, self._eps)

    def feed_forward(self, branch: Tensor, residual: Tensor) -> Tensor:
        return rms_norm(self.mlp(residual.add_(branch)), self.mlp_norm, self._eps)

    def projections(self) -> Iterator[Linear]:
        yield from self.attention.projections()
        yield from self.mlp.projections()

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield from self.attention.weight_slots(f"{prefix}.self_attn")
        after_attention, after_mlp = self._norm_names
        yield WeightSlot(f"{prefix}.{after_attention}.weight", self.attention_norm)
        yield from self.mlp.weight_slots(f"{prefix}.mlp")
        yield WeightSlot(f"{prefix}.{after_mlp}.weight", self.mlp_norm)
