"""What decoder layers are built of: attention and the gated MLP, with the names their weights have on disk."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.activation import gelu_tanh_and_mul, silu_and_mul
from ...kernels.linear import Linear
from ...kernels.norm_rotary import rotate_and_write
from ...kernels.paged_attention import AttentionMetadata, paged_attention
from ..model_config import ModelConfig
from ..weights import WeightSlot

_ACTIVATIONS = {"silu": silu_and_mul, "gelu_tanh": gelu_tanh_and_mul}


@dataclass(frozen=True)
class BlankWeights:
    """Makes weights that are still to be filled."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device

    def matrix(self, rows: int, columns: int) -> Tensor:
        return torch.empty(rows, columns, dtype=self.dtype, device=self.device)

    def linear(self, out_size: int, in_size: int, bias: bool = False, quantizable: bool = True) -> Linear:
        offsets = torch.empty(out_size, dtype=self.dtype, device=self.device) if bias else None
        return Linear(self.matrix(out_size, in_size), offsets, quantizable)

    def norm(self, size: int) -> Tensor:
        """In float32 where something is added to the weights: half precision would lose most of a small one."""
        dtype = torch.float32 if self.config.norm_offset else self.dtype
        return torch.empty(size, dtype=dtype, device=self.device)


@dataclass(frozen=True)
class Step:
    """What all layers need to know of a batch.

    rotary: for each of the model's ropes, the cosines and sines of the tokens' positions, [2, num_tokens,
    rotary_dim / 2]. slots: [num_tokens] int64, where their keys and values belong.
    """

    rotary: Sequence[Tensor]
    slots: Tensor
    metadata: AttentionMetadata


class Attention:
    """Grouped-query attention with rotary positions; query, key and value projections are one matrix.

    `rope` is the index of the layer's rope among the model's, which a `Step` has in the same order.
    """

    def __init__(self, blank: BlankWeights, rope: int, sliding_window: int | None) -> None:
        config = blank.config
        self._config = config
        self._rope = rope
        self._sliding_window = sliding_window
        query_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self._sizes = [query_size, kv_size, kv_size]
        self.qkv = blank.linear(sum(self._sizes), config.hidden_size, config.qkv_bias)
        self.query_norm = blank.norm(config.head_dim) if config.qk_norm else None
        self.key_norm = blank.norm(config.head_dim) if config.qk_norm else None
        self.output = blank.linear(config.hidden_size, query_size, config.output_bias)

    def __call__(self, x: Tensor, key_cache: Tensor, value_cache: Tensor, step: Step) -> Tensor:
        """x: [num_tokens, hidden_size]. Writes keys and values into the caches; returns x's shape."""
        config = self._config
        cos, sin = step.rotary[self._rope]
        query = rotate_and_write(
            self.qkv(x),
            cos,
            sin,
            key_cache,
            value_cache,
            step.slots,
            self.query_norm,
            self.key_norm,
            config.rms_norm_eps,
        )
        attended = paged_attention(
            query,
            key_cache,
            value_cache,
            step.metadata,
            config.attention_scale,
            self._sliding_window,
            config.attention_soft_cap,
        )
        return self.output(attended.flatten(1))

    def projections(self) -> Iterator[Linear]:
        yield self.qkv
        yield self.output

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        if self._config.has_fused_projections:
            yield from linear_slots(self.qkv, [f"{prefix}.qkv_proj"])
        else:
            yield from linear_slots(self.qkv, [f"{prefix}.{name}_proj" for name in "qkv"], self._sizes)
        yield from linear_slots(self.output, [f"{prefix}.o_proj"])
        if self.query_norm is not None and self.key_norm is not None:
            yield WeightSlot(f"{prefix}.q_norm.weight", self.query_norm, self._config.norm_offset)
            yield WeightSlot(f"{prefix}.k_norm.weight", self.key_norm, self._config.norm_offset)


@dataclass(frozen=True)
class MlpNames:
    """What a checkpoint calls the parts of a gated MLP; `gate_up` is one name where it has them as one matrix."""

    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"


class GatedMlp:
    """down(activation(gate) * up); gate and up are one matrix."""

    def __init__(self, blank: BlankWeights, inner_size: int, names: MlpNames, bias: bool = False) -> None:
        hidden_size = blank.config.hidden_size
        self._activate = _ACTIVATIONS[blank.config.activation]
        self._names = names
        self.gate_up = blank.linear(2 * inner_size, hidden_size, bias)
        self.down = blank.linear(hidden_size, inner_size, bias)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [num_tokens, hidden_size]. Returns the same shape."""
        return self.down(self._activate(self.gate_up(x)))

    def projections(self) -> Iterator[Linear]:
        yield self.gate_up
        yield self.down

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield from linear_slots(self.gate_up, [f"{prefix}.{name}" for name in self._names.gate_up])
        yield from linear_slots(self.down, [f"{prefix}.{self._names.down}"])


def linear_slots(linear: Linear, names: Sequence[str], sizes: Sequence[int] | None = None) -> Iterator[WeightSlot]:
    """The parts of a projection under the names the checkpoint gives them: equal parts, or of the sizes given."""
    sizes = list(sizes or [len(linear.weight) // len(names)] * len(names))
    for name, weight in zip(names, linear.weight.split_with_sizes(sizes), strict=True):
        yield WeightSlot(f"{name}.weight", weight)
    if linear.bias is not None:
        for name, bias in zip(names, linear.bias.split_with_sizes(sizes), strict=True):
            yield WeightSlot(f"{name}.bias", bias)
