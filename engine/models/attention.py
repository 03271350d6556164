"""Attention of a decoder layer: its projections, heads' norms, rotary positions, and what it writes into the cache."""

from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor

from ...kernels.kv_cache import KVScales
from ...kernels.linear import Activations, Linear, RowFormat
from ...kernels.norm_rotary import rms_norm, rotate_and_write
from ...kernels.paged_attention import paged_attention
from ..checkpoints.cut import OF_OUTPUTS
from ..checkpoints.model_config import ModelConfig
from ..checkpoints.weights import WeightSlot
from .blocks import BlankWeights, Step, linear_slots

# Of keys and of values; the first of each is one scale for both.
_KV_SCALE_NAMES = (("kv_scale", "k_proj.k_scale", "k_scale"), ("kv_scale", "v_proj.v_scale", "v_scale"))


class Attention:
    """Grouped-query attention with rotary positions; query, key and value projections are one matrix.

    `rope` is the index of the layer's rope among the model's, which a `Step` has in the same order.
    """

    def __init__(self, blank: BlankWeights, rope: int, sliding_window: int | None) -> None:
        config = blank.config
        self._config = config
        self._ranks = blank.ranks
        self._rope = rope
        self._sliding_window = sliding_window
        query_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self._sizes = [query_size, kv_size, kv_size]
        self._names, self._stored_sizes = ["q_proj", "k_proj", "v_proj"], self._sizes
        self._gate_size = query_size if config.has_output_gate else 0
        if config.has_output_gate:
            self._stored_sizes = [2 * query_size, kv_size, kv_size]
        number = config.num_qkv_parts
        self._names, self._stored_sizes = self._names[:number], self._stored_sizes[:number]
        if config.has_fused_qkv:
            self._names, self._stored_sizes = ["qkv_proj"], [sum(self._sizes)]
        self._orders = gate_orders(config) if config.has_output_gate else rotary_orders(config)
        self.qkv = blank.linear(
            self._names, self._stored_sizes, config.hidden_size, config.qkv_bias, orders=self._orders
        )
        are_of_all = config.qk_norm == "all"
        self.query_norm = blank.norm(query_size if are_of_all else config.head_dim) if config.qk_norm else None
        has_key_norm = config.qk_norm and config.kv_source is None
        self.key_norm = blank.norm(kv_size if are_of_all else config.head_dim) if has_key_norm else None
        heads = config.num_attention_heads
        self.head_gates = blank.linear(["gate_proj"], [heads], config.hidden_size) if config.has_head_gates else None
        self._output_name = config.names.attention_output
        self.output = blank.linear([self._output_name], [config.hidden_size], query_size, config.output_bias)
        self._loaded_sinks = torch.empty(heads, dtype=blank.dtype, device=blank.device) if config.has_sinks else None
        # On the host: the kernels take them as plain numbers.
        self._loaded_kv_scales = torch.ones(2)

    @cached_property
    def sinks(self) -> Tensor | None:
        """Scores beside those of the keys, where a family has them: see `paged_attention`."""
        return None if self._loaded_sinks is None else self._loaded_sinks.float()

    @cached_property
    def _kv_scales(self) -> KVScales:
        """Those of a cache in FP8, once the weights are there."""
        return KVScales(*self._loaded_kv_scales.tolist())

    @cached_property
    def _head_norms(self) -> tuple[Tensor | None, Tensor | None]:
        """The weights of the norms that heads have before they are rotated, which changes nothing of their size."""
        match self._config.qk_norm:
            case "heads":
                return self.query_norm, self.key_norm
            case "rotated":
                assert self.query_norm is not None
                ones = torch.ones_like(self.query_norm)
                return ones, ones
        return None, None

    @cached_property
    def _late_weights(self) -> Tensor:
        """[head_dim]: the weights of norms after that. A score is a sum of products, so queries may have the keys'."""
        assert self.query_norm is not None
        assert self.key_norm is not None
        return (self.query_norm.float() * self.key_norm.float()).to(self.query_norm.dtype)

    @property
    def row_format(self) -> RowFormat | None:
        """The form that it takes its input in best; see `Linear.row_format`."""
        # Gates read the input too.
        return self.qkv.row_format if self.head_gates is None else None

    def __call__(self, x: Activations, key_cache: Tensor, value_cache: Tensor, step: Step) -> Tensor:
        """x: [num_tokens, hidden_size]. Writes keys and values into the caches; returns the rows that `step` wants."""
        config = self._config
        projected = self.project(x)
        qkv = projected[:, self._gate_size :] if self._gate_size else projected
        query = self._queries(qkv, key_cache, value_cache, step)
        if config.qk_norm == "rotated":
            query = query * self._late_weights
        if step.query_factors is not None:
            query = query * step.query_factors
        attended = paged_attention(
            query if step.wanted is None else query[step.wanted],
            key_cache,
            value_cache,
            step.metadata,
            config.attention_scale,
            self._sliding_window,
            config.attention_soft_cap,
            self._kv_scales,
            self.sinks,
        ).flatten(1)
        if self._gate_size:
            gate = projected[:, : self._gate_size]
            attended = attended * torch.sigmoid(gate if step.wanted is None else gate[step.wanted])
        if self.head_gates is not None:
            assert isinstance(x, Tensor), "it has no row format"
            gate = torch.sigmoid(self.head_gates(x if step.wanted is None else x[step.wanted]))
            attended = (attended.view(*gate.shape, -1) * gate.unsqueeze(-1)).flatten(1)
        return self._ranks.sum(self.output(attended))

    def _queries(self, qkv: Tensor, key_cache: Tensor, value_cache: Tensor, step: Step) -> Tensor:
        """[num_tokens, num_heads, head_dim]: what `project` made of queries, rotated; writes keys and values."""
        cos, sin = step.rotary[self._rope]
        norms, eps = self._head_norms, self._config.rms_norm_eps
        return rotate_and_write(qkv, cos, sin, key_cache, value_cache, step.slots, *norms, eps, self._kv_scales)

    def project(self, x: Activations) -> Tensor:
        """Queries, keys and values side by side, of x: [num_tokens, hidden_size]; before them gates, if there are."""
        qkv = self.qkv(x)
        if self._config.key_scale != 1:
            qkv.split_with_sizes(self._sizes, dim=1)[1].mul_(self._config.key_scale)
        if self._config.qk_norm == "all":
            queries, keys, _ = qkv.split_with_sizes(self._sizes, dim=1)
            for part, norm in ((queries, self.query_norm), (keys, self.key_norm)):
                assert norm is not None
                part.copy_(rms_norm(part.contiguous(), norm, self._config.rms_norm_eps))
        return qkv

    def projections(self) -> Iterator[Linear]:
        yield self.qkv
        if self.head_gates is not None:
            yield self.head_gates
        yield self.output

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        names = [f"{prefix}.{name}" for name in self._names]
        yield from linear_slots(self.qkv, names, self._stored_sizes, self._orders)
        if self.head_gates is not None:
            yield from linear_slots(self.head_gates, [f"{prefix}.gate_proj"])
        yield from linear_slots(self.output, [f"{prefix}.{self._output_name}"])
        called = self._config.names
        for name, norm in ((called.query_norm, self.query_norm), (called.key_norm, self.key_norm)):
            if norm is not None:
                yield WeightSlot(f"{prefix}.{name}.weight", norm, self._config.norm_offset)
        if self._loaded_sinks is not None:
            yield WeightSlot(f"{prefix}.sinks", self._loaded_sinks, axes=OF_OUTPUTS)
        if self._config.quantization is not None:
            yield from self._kv_scale_slots(prefix)

    def _kv_scale_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """The scales of a cache in FP8 by all the names that quantisers give them; many checkpoints have none."""
        for scale, names in zip(self._loaded_kv_scales, _KV_SCALE_NAMES, strict=True):
            for name in names:
                yield WeightSlot(f"{prefix}.{name}", scale, is_optional=True, is_drawn=False, is_positive=True)


def rotary_orders(config: ModelConfig) -> list[Tensor | None]:
    """Where a checkpoint has the outputs of queries, keys and values, if elsewhere than they are multiplied here.

    Where neighbours are turned against each other, the first ones of all pairs become a head's first half, and the
    second ones its second. Queries and keys are so alike, so that their products stay what they are.
    """
    if not config.has_rotary_pairs:
        return []
    assert not config.has_fused_qkv, "queries, keys and values are told apart by their names"
    assert not config.qk_norm, "norms have weights in the checkpoint's order"
    of_head = torch.cat((halved_pairs(config.rotary_dim), torch.arange(config.rotary_dim, config.head_dim)))

    def of_heads(number: int) -> Tensor:
        return (torch.arange(number).unsqueeze(1) * config.head_dim + of_head).flatten()

    return [of_heads(config.num_attention_heads), of_heads(config.num_key_value_heads), None]


def halved_pairs(size: int) -> Tensor:
    """The first ones of all pairs among so many, then the second ones."""
    return torch.cat((torch.arange(0, size, 2), torch.arange(1, size, 2)))


def gate_orders(config: ModelConfig) -> list[Tensor | None]:
    """Gates before queries, where a checkpoint has each head's query and then its gate."""
    assert not config.has_fused_qkv, "queries and keys are told apart by their names"
    assert not config.has_rotary_pairs, "one order at a time"
    pairs = torch.arange(2 * config.num_attention_heads * config.head_dim).view(-1, 2, config.head_dim)
    return [pairs[:, [1, 0]].transpose(0, 1).flatten(), None, None]
