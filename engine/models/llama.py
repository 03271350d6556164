"""The layer of the Llama family: a norm before attention, a norm before the MLP.

Covers Llama, Mistral, Qwen, Phi-3, SmolLM3, Granite and the mixtures among them; what differs is a field of
`ModelConfig`.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from ...kernels.linear import Linear
from ...kernels.norm_rotary import add_rms_norm
from ..checkpoints.weights import WeightSlot
from .blocks import Attention, BlankWeights, GatedMlp, MlpNames, Step
from .moe import ExpertsMlp, Mixture


class LlamaLayer:
    """See `DecoderLayer`."""

    def __init__(self, blank: BlankWeights, index: int, rope: int) -> None:
        config = blank.config
        self._eps = config.rms_norm_eps
        self._residual_scale = config.residual_scale
        self.input_norm = blank.norm(config.hidden_size)
        self.attention = self._new_attention(blank.within("self_attn"), rope, config.sliding_windows[index])
        self.mlp_norm = blank.norm(config.hidden_size)
        self.mlp = self._new_mlp(blank, index)

    def _new_attention(self, blank: BlankWeights, rope: int, sliding_window: int | None) -> Attention:
        return Attention(blank, rope, sliding_window)

    def _new_mlp(self, blank: BlankWeights, index: int) -> GatedMlp | Mixture[Any]:
        config = blank.config
        if config.moe is not None and config.moe.sparse_layers[index]:
            return ExpertsMlp(blank, config.moe)
        names = MlpNames(("gate_up_proj",)) if config.has_fused_projections else MlpNames()
        return GatedMlp(blank.within("mlp"), config.intermediate_size, names, config.mlp_bias)

    @property
    def mixture(self) -> Mixture[Any] | None:
        return self.mlp if isinstance(self.mlp, Mixture) else None

    def attend(self, branch: Tensor, residual: Tensor, key_cache: Tensor, value_cache: Tensor, step: Step) -> Tensor:
        normed = add_rms_norm(branch, residual, self.input_norm, self._eps)
        return self._scaled(self.attention(normed, key_cache, value_cache, step))

    def feed_forward(self, branch: Tensor, residual: Tensor) -> Tensor:
        return self._scaled(self.mlp(add_rms_norm(branch, residual, self.mlp_norm, self._eps)))

    def _scaled(self, branch: Tensor) -> Tensor:
        """In place, of what nobody else has."""
        return branch if self._residual_scale == 1 else branch.mul_(self._residual_scale)

    def projections(self) -> Iterator[Linear]:
        yield from self.attention.projections()
        yield from self.mlp.projections()

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield WeightSlot(f"{prefix}.input_layernorm.weight", self.input_norm)
        yield from self.attention.weight_slots(f"{prefix}.self_attn")
        yield WeightSlot(f"{prefix}.post_attention_layernorm.weight", self.mlp_norm)
        mlp = "mlp" if self.mixture is None else self.mixture.name
        yield from self.mlp.weight_slots(f"{prefix}.{mlp}")
