"""The Llama family: pre-norm decoder, grouped-query attention with rotary positions, gated MLP.

Covers Llama, Mistral (sliding window), Qwen2 (biases on q, k, v) and Qwen3 (norms on q and k); what differs between
them is a field of `ModelConfig`. Query, key and value projections are one matrix, and so are gate and up.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import embedding

from ...kernels.activation import silu_and_mul
from ...kernels.linear import Linear
from ...kernels.norm_rotary import add_rms_norm, rms_norm, rotary_table, rotate_and_write
from ...kernels.paged_attention import AttentionMetadata, paged_attention
from ..config import ModelConfig
from ..weights import WeightSlot, draw_weights, load_weights
from .rope import inverse_frequencies


@dataclass(frozen=True)
class LlamaLayer:
    """One block's weights. qkv: rows of q, then k, then v. gate_up: rows of gate, then up."""

    input_norm: Tensor
    qkv: Linear
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    sliding_window: int | None


class LlamaModel:
    """Weights and forward pass. The KV cache belongs to the caller."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        self._query_size = config.num_attention_heads * config.head_dim
        self._kv_size = config.num_key_value_heads * config.head_dim
        self._scale = config.head_dim**-0.5
        self._embedding = self._empty(config.vocab_size, config.hidden_size)
        self._layers = [self._new_layer(window) for window in config.sliding_windows]
        self._final_norm = self._empty(config.hidden_size)
        tied = config.tie_word_embeddings
        self._head = Linear(self._embedding if tied else self._empty(config.vocab_size, config.hidden_size))
        table = rotary_table(inverse_frequencies(config.rope, config.head_dim), config.max_position_embeddings)
        self._cos, self._sin = table.to(device=device, dtype=dtype)

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def _new_linear(self, out_size: int, in_size: int, bias: bool) -> Linear:
        return Linear(self._empty(out_size, in_size), self._empty(out_size) if bias else None)

    def _new_layer(self, sliding_window: int | None) -> LlamaLayer:
        config = self.config
        hidden, inner = config.hidden_size, config.intermediate_size
        return LlamaLayer(
            input_norm=self._empty(hidden),
            qkv=self._new_linear(self._query_size + 2 * self._kv_size, hidden, config.qkv_bias),
            query_norm=self._empty(config.head_dim) if config.qk_norm else None,
            key_norm=self._empty(config.head_dim) if config.qk_norm else None,
            output=self._new_linear(hidden, self._query_size, config.output_bias),
            mlp_norm=self._empty(hidden),
            gate_up=self._new_linear(2 * inner, hidden, config.mlp_bias),
            down=self._new_linear(hidden, inner, config.mlp_bias),
            sliding_window=sliding_window,
        )

    def load(self, folder: Path) -> None:
        """Fill the weights from a checkpoint folder. Raises `ModelError` naming the tensor that does not fit."""
        # A tied checkpoint may carry the shared matrix a second time under the head's name.
        ignored = ("lm_head.weight",) if self.config.tie_word_embeddings else ()
        load_weights(folder, self.weight_slots(), ignored)

    def draw(self, seed: int) -> None:
        """Fill the weights at random."""
        draw_weights(self.weight_slots(), seed)

    def prepack(self) -> None:
        """Bring the filled weights into the layout that is fastest here; they cannot be filled again after that."""
        self._head.prepack()
        for layer in self._layers:
            for projection in (layer.qkv, layer.output, layer.gate_up, layer.down):
                projection.prepack()

    def weight_slots(self) -> Iterator[WeightSlot]:
        """Every weight under the name that a checkpoint gives it."""
        yield WeightSlot("model.embed_tokens.weight", self._embedding)
        yield WeightSlot("model.norm.weight", self._final_norm)
        if not self.config.tie_word_embeddings:
            yield WeightSlot("lm_head.weight", self._head.weight)
        for index, layer in enumerate(self._layers):
            yield from self._layer_slots(f"model.layers.{index}", layer)

    def _layer_slots(self, prefix: str, layer: LlamaLayer) -> Iterator[WeightSlot]:
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        yield WeightSlot(f"{prefix}.input_layernorm.weight", layer.input_norm)
        yield WeightSlot(f"{prefix}.post_attention_layernorm.weight", layer.mlp_norm)
        sizes = [self._query_size, self._kv_size, self._kv_size]
        yield from _fused_slots(layer.qkv, [f"{attention}.{name}_proj" for name in "qkv"], sizes)
        yield from _fused_slots(layer.output, [f"{attention}.o_proj"], [self.config.hidden_size])
        inner = self.config.intermediate_size
        yield from _fused_slots(layer.gate_up, [f"{mlp}.gate_proj", f"{mlp}.up_proj"], [inner, inner])
        yield from _fused_slots(layer.down, [f"{mlp}.down_proj"], [self.config.hidden_size])
        if layer.query_norm is not None and layer.key_norm is not None:
            yield WeightSlot(f"{attention}.q_norm.weight", layer.query_norm)
            yield WeightSlot(f"{attention}.k_norm.weight", layer.key_norm)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_cache: Tensor,
        slots: Tensor,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """Compute a batch of new tokens; writes their keys and values into `kv_cache`.

        token_ids, positions, slots: [num_tokens] int64. kv_cache:
        [2, num_layers, num_blocks, block_size, num_kv_heads, head_dim]. Returns [num_tokens, hidden_size], before
        the final norm.
        """
        # The embedding is the first branch that joins the residual stream.
        branch = embedding(token_ids, self._embedding)
        residual = torch.zeros_like(branch)
        cos, sin = self._cos[positions], self._sin[positions]
        eps = self.config.rms_norm_eps
        for index, layer in enumerate(self._layers):
            normed = add_rms_norm(branch, residual, layer.input_norm, eps)
            key_cache, value_cache = kv_cache[0, index], kv_cache[1, index]
            query = rotate_and_write(
                layer.qkv(normed), cos, sin, key_cache, value_cache, slots, layer.query_norm, layer.key_norm, eps
            )
            attended = paged_attention(query, key_cache, value_cache, metadata, self._scale, layer.sliding_window)
            normed = add_rms_norm(layer.output(attended.flatten(1)), residual, layer.mlp_norm, eps)
            branch = layer.down(silu_and_mul(layer.gate_up(normed)))
        return residual.add_(branch)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [n, hidden_size] as `forward` gave it. Returns [n, vocab_size] float32."""
        return self._head(rms_norm(hidden, self._final_norm, self.config.rms_norm_eps)).float()


def _fused_slots(fused: Linear, names: list[str], sizes: list[int]) -> Iterator[WeightSlot]:
    """The parts of a fused projection under the names the checkpoint gives them."""
    for name, weight in zip(names, fused.weight.split_with_sizes(sizes), strict=True):
        yield WeightSlot(f"{name}.weight", weight)
    if fused.bias is not None:
        for name, bias in zip(names, fused.bias.split_with_sizes(sizes), strict=True):
            yield WeightSlot(f"{name}.bias", bias)
