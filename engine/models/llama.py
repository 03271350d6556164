"""The layer of the Llama family: a norm before attention, a norm before the MLP.

Covers Llama, Mistral, Qwen, Phi-3, SmolLM3, Granite and the mixtures among them; what differs is a field of
`ModelConfig`. Of Qwen3-Next and Granite 4 most layers have a state for attention, DeepSeek's attend to latents.
"""

from collections.abc import Iterator
from typing import Any, Protocol

from torch import Tensor

from ...kernels.linear import RowFormat
from ..checkpoints.weights import WeightSlot
from .attention import Attention
from .blocks import BlankWeights, Step
from .latent_attention import LatentAttention
from .layer import DecoderLayer
from .mlp import GatedMlp, PlainMlp
from .moe import Mixture, new_feed_forward
from .norms import LayerNorm, RmsNorm, new_norm
from .state_mixers import new_state_mixer


class Reader(Protocol):
    """What is called with a norm's rows, in its `row_format` if it has one."""

    @property
    def row_format(self) -> RowFormat | None: ...


class LlamaLayer(DecoderLayer):
    """See `DecoderLayer`."""

    def __init__(self, blank: BlankWeights, index: int, rope: int) -> None:
        config = blank.config
        self._mlp_name = config.names.mlp.module
        self._residual_scale = config.residual_scale
        self._norms = {name: new_norm(blank) for name in config.names.layer_norms}
        self.input_norm, *others = self._norms.values()
        self.mlp_norm = others[0] if others else self.input_norm
        states = config.state_layers
        if states is not None and states.layers[index]:
            self._attention_name = states.module
            self.attention = new_state_mixer(blank.within(states.module), states)
        else:
            self._attention_name = config.names.attention
            within = blank.within(self._attention_name)
            self.attention = self._new_attention(within, rope, config.sliding_windows[index])
        self.mlp = self._new_mlp(blank, index)

    def _new_attention(self, blank: BlankWeights, rope: int, sliding_window: int | None) -> Attention | LatentAttention:
        latent = blank.config.latent_attention
        return Attention(blank, rope, sliding_window) if latent is None else LatentAttention(blank, latent, rope)

    def _new_mlp(self, blank: BlankWeights, index: int) -> GatedMlp | PlainMlp | Mixture:
        return new_feed_forward(blank, index)

    def attend(self, branch: Tensor, residual: Tensor, key_cache: Tensor, value_cache: Tensor, step: Step) -> Tensor:
        normed = self._normed(self.input_norm, self.attention, branch, residual)
        return self._scaled(self.attention(normed, key_cache, value_cache, step))

    def feed_forward(self, branch: Tensor, residual: Tensor, step: Step) -> Tensor:
        return self._scaled(self.mlp(self._normed(self.mlp_norm, self.mlp, branch, residual)))

    def _normed(self, norm: RmsNorm | LayerNorm, reader: Reader, branch: Tensor, residual: Tensor) -> Any:
        """The norm of the stream once `branch` has been added to it, in place, in the form that `reader` takes best."""
        return norm.of_sum_in(reader.row_format, branch, residual)

    def _scaled(self, branch: Tensor) -> Tensor:
        """In place, of what nobody else has."""
        return branch if self._residual_scale == 1 else branch.mul_(self._residual_scale)

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        (first, norm), *others = self._norms.items()
        yield from norm.weight_slots(f"{prefix}.{first}")
        yield from self.attention.weight_slots(f"{prefix}.{self._attention_name}")
        for name, norm in others:
            yield from norm.weight_slots(f"{prefix}.{name}")
        mlp = self.mlp.name if isinstance(self.mlp, Mixture) else self._mlp_name
        yield from self.mlp.weight_slots(f"{prefix}.{mlp}" if mlp else prefix)


class ParallelLayer(LlamaLayer):
    """Command R's: attention and MLP side by side, on one norm."""

    def feed_forward(self, branch: Tensor, residual: Tensor, step: Step) -> Tensor:
        # What attention read, not what it made of it; cheaper computed again than kept.
        normed = self.mlp_norm(residual)
        residual.add_(branch)
        return self._scaled(self.mlp(normed))
