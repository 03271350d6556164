"""The layer of Falcon: LayerNorms, and attention and MLP side by side on one input in all but the oldest."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ..checkpoints.model_config import ModelConfig
from ..checkpoints.weights import WeightSlot
from .attention import Attention
from .blocks import BlankWeights, Step, linear_slots
from .layer import DecoderLayer
from .mlp import new_mlp
from .norms import LayerNorm


class FalconLayer(DecoderLayer):
    """See `DecoderLayer`."""

    def __init__(self, blank: BlankWeights, index: int, rope: int) -> None:
        falcon = blank.config.falcon
        assert falcon is not None, "not read as a Falcon"
        self._falcon = falcon
        self.attention_norm = LayerNorm(blank)
        self.mlp_norm = LayerNorm(blank) if falcon.mlp_norm else self.attention_norm
        self.attention = FalconAttention(blank.within("self_attention"), rope, None)
        self.mlp = new_mlp(blank)

    def attend(self, branch: Tensor, residual: Tensor, key_cache: Tensor, value_cache: Tensor, step: Step) -> Tensor:
        return self.attention(self.attention_norm.of_sum(branch, residual), key_cache, value_cache, step)

    def feed_forward(self, branch: Tensor, residual: Tensor, step: Step) -> Tensor:
        if not self._falcon.is_parallel:
            return self.mlp(self.mlp_norm.of_sum(branch, residual))
        # What attention read, not what it made of it; a norm that both have is cheaper computed again than kept.
        normed = self.mlp_norm(residual)
        residual.add_(branch)
        return self.mlp(normed)

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield from self.attention_norm.weight_slots(f"{prefix}.{self._falcon.attention_norm}")
        if self._falcon.mlp_norm:
            yield from self.mlp_norm.weight_slots(f"{prefix}.{self._falcon.mlp_norm}")
        yield from self.attention.weight_slots(f"{prefix}.self_attention")
        yield from self.mlp.weight_slots(f"{prefix}.mlp")


class FalconAttention(Attention):
    """Its query, key and value heads lie together on disk, group by group."""

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        order = _rows_on_disk(self._config)
        for slot in linear_slots(self.qkv, [f"{prefix}.query_key_value"]):
            yield replace(slot, order=order)
        yield from linear_slots(self.output, [f"{prefix}.dense"])


def _rows_on_disk(config: ModelConfig) -> Tensor:
    """Where the checkpoint has each row of queries, then keys, then values: [rows] int64.

    There a group is its queries, its key and its value. With one KV head, as in Falcon-7B, that is our order.
    """
    groups = config.num_key_value_heads
    rows = torch.arange((config.num_attention_heads + 2 * groups) * config.head_dim)
    heads = rows.view(groups, config.num_attention_heads // groups + 2, config.head_dim)
    return torch.cat([heads[:, :-2].flatten(), heads[:, -2].flatten(), heads[:, -1].flatten()])
