"""The layer of OLMo 2 and 3: norms after attention and MLP, none before; queries and keys have norms over all heads."""

from collections.abc import Iterator

from torch import Tensor

from ...kernels.linear import Linear
from ...kernels.norm_rotary import rms_norm
from ..checkpoints.weights import WeightSlot
from .blocks import Attention, BlankWeights, GatedMlp, MlpNames, Step


class OlmoLayer:
    """See `DecoderLayer`."""

    mixture = None

    def __init__(self, blank: BlankWeights, index: int, rope: int) -> None:
        config = blank.config
        self._eps = config.rms_norm_eps
        self.attention = OlmoAttention(blank.within("self_attn"), rope, config.sliding_windows[index])
        self.attention_norm = blank.norm(config.hidden_size)
        self.mlp = GatedMlp(blank.within("mlp"), config.intermediate_size, MlpNames())
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
        yield WeightSlot(f"{prefix}.post_attention_layernorm.weight", self.attention_norm)
        yield from self.mlp.weight_slots(f"{prefix}.mlp")
        yield WeightSlot(f"{prefix}.post_feedforward_layernorm.weight", self.mlp_norm)


class OlmoAttention(Attention):
    """Its norms are of all heads together, before these are rotated."""

    def __init__(self, blank: BlankWeights, rope: int, sliding_window: int | None) -> None:
        super().__init__(blank, rope, sliding_window)
        query_size, key_size, _ = self._sizes
        self.all_queries_norm, self.all_keys_norm = blank.norm(query_size), blank.norm(key_size)

    def project(self, x: Tensor) -> Tensor:
        qkv = super().project(x)
        queries, keys, _ = qkv.split_with_sizes(self._sizes, dim=1)
        for part, norm in ((queries, self.all_queries_norm), (keys, self.all_keys_norm)):
            part.copy_(rms_norm(part.contiguous(), norm, self._config.rms_norm_eps))
        return qkv

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield from super().weight_slots(prefix)
        yield WeightSlot(f"{prefix}.q_norm.weight", self.all_queries_norm)
        yield WeightSlot(f"{prefix}.k_norm.weight", self.all_keys_norm)
