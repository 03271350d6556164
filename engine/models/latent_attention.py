"""Attention to latents, as DeepSeek's models have it: a token's keys and values are products of a few numbers."""

from collections.abc import Iterator

import torch
from torch import Tensor

from ...kernels.linear import Activations, Linear, RowFormat
from ...kernels.norm_rotary import rms_norm, rotate_and_write_latents
from ...kernels.paged_attention import paged_attention
from ..checkpoints.model_config import LatentAttentionConfig
from ..checkpoints.weights import WeightSlot
from .attention import halved_pairs
from .blocks import BlankWeights, Step, linear_slots

# The families' own, whatever their other norms have.
_NORM_EPS = 1e-6


class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), called as `Attention` is.

    The cache has of a token its latent, after a norm, and behind it the rotated part of a key, which all heads share.
    Of the latent a head's keys and values would be products. It is multiplied by neither: queries are by the keys'
    matrix, and by the values' what is attended to. So the latents, which are as good as one head's keys, are the values
    too. Where ranks share the model each has its heads, and all latents.
    """

    def __init__(self, blank: BlankWeights, latent: LatentAttentionConfig, rope: int) -> None:
        config = blank.config
        self._config, self._latent, self._rope, self._ranks = config, latent, rope, blank.ranks
        heads, hidden = config.num_attention_heads, config.hidden_size
        self._query_name = "q_proj" if latent.query_rank is None else "q_b_proj"
        self._query_orders = [_order(heads, latent.plain_dim, latent.rotary_dim) if config.has_rotary_pairs else None]
        key_order = _order(1, latent.rank, latent.rotary_dim) if config.has_rotary_pairs else None
        # The latent that queries are made of, where there is one, then that of keys and values with the shared key.
        self._names, self._sizes, self._orders = ["kv_a_proj_with_mqa"], [config.head_dim], [key_order]
        self.query_norm: Tensor | None = None
        if latent.query_rank is not None:
            self._names, self._sizes = ["q_a_proj", *self._names], [latent.query_rank, *self._sizes]
            self._orders = [None, *self._orders]
            self.query_norm = blank.norm(latent.query_rank)
        self.inputs = blank.linear(self._names, self._sizes, hidden, config.qkv_bias, orders=self._orders)
        self.query = blank.linear(
            [self._query_name],
            [heads * latent.query_dim],
            latent.query_rank or hidden,
            orders=self._query_orders,
        )
        self.latent_norm = blank.norm(latent.rank)
        self._output_name = config.names.attention_output
        expanded = heads * (latent.plain_dim + latent.value_dim)
        self.expand = blank.linear(["kv_b_proj"], [expanded], latent.rank, is_plain=True)
        self.output = blank.linear([self._output_name], [hidden], heads * latent.value_dim, config.output_bias)

    @property
    def row_format(self) -> RowFormat | None:
        """The form that it takes its input in best; see `Linear.row_format`."""
        # Without that norm two products read the input.
        return None if self.query_norm is None else self.inputs.row_format

    def __call__(self, x: Activations, key_cache: Tensor, value_cache: Tensor, step: Step) -> Tensor:
        """x: [num_tokens, hidden_size]. Writes latents into the cache; returns the rows that `step` wants.

        Both caches are the same one.
        """
        rank = self._latent.rank
        query = self._absorbed(x, key_cache, step)
        attended = paged_attention(
            query if step.wanted is None else query[step.wanted],
            key_cache,
            value_cache[..., :rank],
            step.metadata,
            self._config.attention_scale,
        )
        _, to_values = self._matrices()
        values = attended.new_empty(*attended.shape[:2], self._latent.value_dim)
        torch.bmm(attended.transpose(0, 1), to_values.transpose(1, 2), out=values.transpose(0, 1))
        return self._ranks.sum(self.output(values.flatten(1)))

    def _absorbed(self, x: Activations, cache: Tensor, step: Step) -> Tensor:
        """[num_tokens, num_heads, head_dim]: queries for what is in the cache, into which x's latents are written."""
        latent, (cos, sin) = self._latent, step.rotary[self._rope]
        inputs = self.inputs(x)
        if self.query_norm is None:
            query = self.query(x)
        else:
            query = self.query(rms_norm(inputs[:, : self._sizes[0]], self.query_norm, _NORM_EPS))
        heads = query.view(len(inputs), -1, latent.query_dim)
        from_keys, _ = self._matrices()
        absorbed = query.new_empty(*heads.shape[:2], self._config.head_dim)
        plain = heads[..., : latent.plain_dim].transpose(0, 1)
        torch.bmm(plain, from_keys, out=absorbed[..., : latent.rank].transpose(0, 1))
        rotate_and_write_latents(
            heads[..., latent.plain_dim :],
            inputs[:, -self._config.head_dim :],
            self.latent_norm,
            _NORM_EPS,
            cos,
            sin,
            absorbed,
            cache,
            step.slots,
        )
        return absorbed if step.query_factors is None else absorbed.mul_(step.query_factors)

    def _matrices(self) -> tuple[Tensor, Tensor]:
        """Each head's [plain_dim, rank] that makes keys of a latent, and [value_dim, rank] that makes values."""
        latent, packed = self._latent, self.expand.packed
        assert isinstance(packed, Tensor), "not plain"
        by_head = packed.view(-1, latent.plain_dim + latent.value_dim, latent.rank)
        return by_head[:, : latent.plain_dim], by_head[:, latent.plain_dim :]

    def projections(self) -> Iterator[Linear]:
        yield self.inputs
        yield self.query
        yield self.expand
        yield self.output

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        names = [f"{prefix}.{name}" for name in self._names]
        yield from linear_slots(self.inputs, names, self._sizes, self._orders)
        yield from linear_slots(self.query, [f"{prefix}.{self._query_name}"], orders=self._query_orders)
        yield from linear_slots(self.expand, [f"{prefix}.kv_b_proj"])
        yield from linear_slots(self.output, [f"{prefix}.{self._output_name}"])
        yield WeightSlot(f"{prefix}.kv_a_layernorm.weight", self.latent_norm)
        if self.query_norm is not None:
            yield WeightSlot(f"{prefix}.q_a_layernorm.weight", self.query_norm)


def _order(num_heads: int, plain: int, turned: int) -> Tensor:
    """Where a checkpoint has the outputs of heads of which the last ones are rotated pairs."""
    of_head = torch.cat((torch.arange(plain), plain + halved_pairs(turned)))
    return (torch.arange(num_heads).unsqueeze(1) * (plain + turned) + of_head).flatten()
