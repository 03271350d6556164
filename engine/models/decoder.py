"""A decoder around its layers: embedding, rotary tables, final norm, head, and its weights' way in."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import embedding

from ...kernels.linear import Linear
from ...kernels.norm_rotary import rms_norm
from ...kernels.paged_attention import AttentionMetadata
from ..checkpoints.model_config import ModelConfig
from ..checkpoints.weights import WeightSlot, draw_weights, load_weights
from .blocks import BlankWeights, Step, linear_slots
from .last_tokens import LastTokens
from .rope import rotary_factors

# What quantised checkpoints hold beside their weights that is not read: scales of activations that were fixed
# beforehand (they are measured row by row here), and what says nothing.
_UNREAD_SUFFIXES = (
    *(".input_scale", ".input_zero_point", ".output_scale"),
    *(".weight_zero_point", ".g_idx", ".weight_shape"),
)


class DecoderLayer(Protocol):
    """One family's layer. A stream of residuals runs past it; what it computes joins the stream in the next one."""

    def attend(self, branch: Tensor, residual: Tensor, key_cache: Tensor, value_cache: Tensor, step: Step) -> Tensor:
        """Add `branch` to `residual`, in place; return attention's output, of the tokens that `step` wants.

        branch, residual: [num_tokens, hidden_size]. Writes the tokens' keys and values into the caches.
        """

    def feed_forward(self, branch: Tensor, residual: Tensor) -> Tensor:
        """Add `branch`, attention's output, to `residual`, in place; return the MLP's. Both: [n, hidden_size]."""

    def projections(self) -> Iterator[Linear]:
        """Every matrix that it multiplies by: nearly all of its weights, and of its work."""

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Every weight under the name that a checkpoint gives it."""


class MakeLayer(Protocol):
    """Makes a layer; `rope` is the index of its rope among the model's."""

    def __call__(self, blank: BlankWeights, index: int, rope: int) -> DecoderLayer: ...


class Decoder:
    """Weights and forward pass. The KV cache belongs to the caller. `parts`: its projections by their names on disk."""

    def __init__(
        self,
        config: ModelConfig,
        max_model_len: int,
        make_layer: MakeLayer,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.config = config
        blank = BlankWeights(config, dtype, device)
        self.parts = blank.parts
        ropes = list(dict.fromkeys(config.ropes))
        self._rotary = [
            rotary_factors(rope, config.rotary_dim, max_model_len).to(device=device, dtype=dtype) for rope in ropes
        ]
        self._embedding = blank.matrix(config.vocab_size, config.hidden_size)
        self._layers = [
            make_layer(blank.within(f"model.layers.{index}"), index, ropes.index(rope))
            for index, rope in enumerate(config.ropes)
        ]
        self._final_norm = blank.norm(config.hidden_size)
        if config.tie_word_embeddings:
            self._head = Linear(self._embedding)
        else:
            self._head = blank.linear(["lm_head"], [config.vocab_size], config.hidden_size)
        # Rounded as the weights are, as Gemma was trained.
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=dtype).item()

    def load(self) -> None:
        """Fill the weights from the checkpoint's folder. Raises `ModelError` naming the tensor that does not fit."""
        # A tied checkpoint may carry the shared matrix a second time under the head's name.
        ignored = ("lm_head.weight",) if self.config.tie_word_embeddings else ()
        unread = _UNREAD_SUFFIXES if self.config.quantization else ()
        load_weights(self.config.path, self.weight_slots(), ignored, unread)

    @property
    def num_parameters(self) -> int:
        """Of the embedding and of every matrix that is multiplied by, norms and biases left out."""
        layers = (each for layer in self._layers for each in layer.projections())
        head = () if self.config.tie_word_embeddings else (self._head,)
        sizes: list[int] = [each.num_outputs * each.num_inputs for each in (*head, *layers)]
        return self._embedding.numel() + sum(sizes)

    def draw(self, seed: int) -> None:
        """Fill the weights at random."""
        draw_weights(self.weight_slots(), seed)

    def prepack(self, quantization: str | None = None) -> None:
        """Bring the filled weights into the layout that is fastest here; they cannot be filled again after that.

        With `quantization="int8"` the layers' projections become int8. The head does not, as in vLLM.
        """
        self._head.prepack()
        for layer in self._layers:
            for projection in layer.projections():
                projection.prepack(int8=quantization == "int8")

    def weight_slots(self) -> Iterator[WeightSlot]:
        """Every weight under the name that a checkpoint gives it."""
        yield WeightSlot("model.embed_tokens.weight", self._embedding)
        yield WeightSlot("model.norm.weight", self._final_norm, self.config.norm_offset)
        if not self.config.tie_word_embeddings:
            yield from linear_slots(self._head, ["lm_head"])
        for index, layer in enumerate(self._layers):
            yield from layer.weight_slots(f"model.layers.{index}")

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_cache: Tensor,
        slots: Tensor,
        metadata: AttentionMetadata,
        last_tokens: LastTokens | None = None,
    ) -> Tensor:
        """Compute a batch of new tokens; writes their keys and values into `kv_cache`.

        token_ids, positions, slots: [num_tokens] int64. kv_cache:
        [2, num_layers, num_blocks, block_size, num_kv_heads, head_dim]. Returns [num_tokens, hidden_size], before
        the final norm, or of the `last_tokens` alone: [num_last, hidden_size].
        """
        # The embedding is the first branch that joins the residual stream.
        branch = embedding(token_ids, self._embedding)
        if self._embedding_scale != 1:
            branch *= self._embedding_scale
        residual = torch.zeros_like(branch)
        # Taken apart once a step: a view of a tensor costs the host a microsecond or two.
        rotary = [table[:, positions].unbind() for table in self._rotary]
        step = Step(rotary, slots, metadata)
        key_caches, value_caches = (cache.unbind() for cache in kv_cache)
        for layer, key_cache, value_cache in zip(self._layers, key_caches, value_caches, strict=True):
            if last_tokens is not None and layer is self._layers[-1]:
                step = replace(step, metadata=last_tokens.attention, wanted=last_tokens.index)
            attended = layer.attend(branch, residual, key_cache, value_cache, step)
            if step.wanted is not None:
                residual = residual[step.wanted]
            branch = layer.feed_forward(attended, residual)
        return residual.add_(branch)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [n, hidden_size] as `forward` gave it. Returns [n, vocab_size] in the model's dtype, or float32.

        Whoever computes with them widens what is needed: the largest of a row can be found without.
        """
        logits = self._head(rms_norm(hidden, self._final_norm, self.config.rms_norm_eps))
        cap = self.config.final_soft_cap
        return logits if cap is None else logits.float().div_(cap).tanh_().mul_(cap)
