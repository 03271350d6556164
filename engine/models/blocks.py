"""What decoder layers are built of: attention and the gated MLP, with the names their weights have on disk."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels.activation import gelu_tanh_and_mul, silu_and_mul
from ...kernels.kv_cache import KVScales
from ...kernels.linear import Linear
from ...kernels.norm_rotary import rotate_and_write
from ...kernels.paged_attention import AttentionMetadata, paged_attention
from ...kernels.weight_memory import empty_weight
from ..checkpoints.cut import OF_MATRIX, OF_OUTPUTS
from ..checkpoints.model_config import ModelConfig
from ..checkpoints.weights import WeightSlot
from ..quantization.stored import StoredModules, stored_modules
from ..sharding.ranks import ALONE, Ranks

# Of keys and of values; the first of each is one scale for both.
_KV_SCALE_NAMES = (("kv_scale", "k_proj.k_scale", "k_scale"), ("kv_scale", "v_proj.v_scale", "v_scale"))
ACTIVATIONS = {"silu": silu_and_mul, "gelu_tanh": gelu_tanh_and_mul}


class LinearPart(NamedTuple):
    """A projection by itself, as checkpoints name it: `size` outputs of the matrix that it is a part of."""

    linear: Linear
    start: int
    size: int


@dataclass(frozen=True)
class BlankWeights:
    """Makes weights that are still to be filled. `prefix`: of their names in the checkpoint, with a dot at its end.

    `parts`: all the projections made, by these names. `ranks`: with whom the model is shared; `config` is then that of
    the share.
    """

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    prefix: str = ""
    parts: dict[str, LinearPart] = field(default_factory=dict)
    ranks: Ranks = ALONE

    def within(self, name: str) -> "BlankWeights":
        """The weights of a part of what this makes the weights of."""
        return replace(self, prefix=f"{self.prefix}{name}.")

    def matrix(self, rows: int, columns: int) -> Tensor:
        return empty_weight((rows, columns), self.dtype, self.device)

    def linear(
        self, names: Sequence[str], sizes: Sequence[int], in_size: int, bias: bool = False, quantizable: bool = True
    ) -> Linear:
        """Modules side by side, each of so many outputs, multiplied as one: quantised where the checkpoint's are."""
        offsets = torch.empty(sum(sizes), dtype=self.dtype, device=self.device) if bias else None
        full_names = [self.prefix + name for name in names]
        quantization = self.config.quantization
        scheme = quantization.scheme(full_names) if quantization and quantizable else None
        if scheme is None:
            linear = Linear(self.matrix(sum(sizes), in_size), offsets, quantizable)
        else:
            linear = Linear(stored_modules(scheme, full_names, sizes, in_size, self.dtype, self.device), offsets)
        for start, name, size in zip(accumulate(sizes, initial=0), full_names, sizes, strict=False):
            self.parts[name] = LinearPart(linear, start, size)
        return linear

    def norm(self, size: int) -> Tensor:
        """In float32 where something is added to the weights: half precision would lose most of a small one."""
        dtype = torch.float32 if self.config.norm_offset else self.dtype
        return torch.empty(size, dtype=dtype, device=self.device)


@dataclass(frozen=True)
class Step:
    """What all layers need to know of a batch.

    rotary: for each of the model's ropes, the cosines and the sines of the tokens' positions, each [num_tokens,
    rotary_dim / 2]. slots: [num_tokens] int64, where their keys and values belong. wanted: [n] int64, the tokens whose
    attention is to be computed, those of `metadata`; None: all. query_factors: [num_tokens, 1, 1], what queries are
    multiplied by; None: by nothing.
    """

    rotary: Sequence[Sequence[Tensor]]
    slots: Tensor
    metadata: AttentionMetadata
    wanted: Tensor | None = None
    query_factors: Tensor | None = None


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
        names = ["q_proj", "k_proj", "v_proj"]
        if config.has_fused_projections:
            names, self._sizes = ["qkv_proj"], [sum(self._sizes)]
        self._names = names
        self.qkv = blank.linear(names, self._sizes, config.hidden_size, config.qkv_bias)
        self.query_norm = blank.norm(config.head_dim) if config.qk_norm else None
        self.key_norm = blank.norm(config.head_dim) if config.qk_norm else None
        self.output = blank.linear(["o_proj"], [config.hidden_size], query_size, config.output_bias)
        # On the host: the kernels take them as plain numbers.
        self._loaded_kv_scales = torch.ones(2)

    @property
    def sinks(self) -> Tensor | None:
        """Scores beside those of the keys, where a family has them: see `paged_attention`."""
        return None

    @cached_property
    def _kv_scales(self) -> KVScales:
        """Those of a cache in FP8, once the weights are there."""
        return KVScales(*self._loaded_kv_scales.tolist())

    def __call__(self, x: Tensor, key_cache: Tensor, value_cache: Tensor, step: Step) -> Tensor:
        """x: [num_tokens, hidden_size]. Writes keys and values into the caches; returns the rows that `step` wants."""
        config = self._config
        cos, sin = step.rotary[self._rope]
        query = rotate_and_write(
            self.project(x),
            cos,
            sin,
            key_cache,
            value_cache,
            step.slots,
            self.query_norm,
            self.key_norm,
            config.rms_norm_eps,
            self._kv_scales,
        )
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
        )
        return self._ranks.sum(self.output(attended.flatten(1)))

    def project(self, x: Tensor) -> Tensor:
        """Queries, keys and values side by side, of x: [num_tokens, hidden_size]."""
        return self.qkv(x)

    def projections(self) -> Iterator[Linear]:
        yield self.qkv
        yield self.output

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield from linear_slots(self.qkv, [f"{prefix}.{name}" for name in self._names], self._sizes)
        yield from linear_slots(self.output, [f"{prefix}.o_proj"])
        if self.query_norm is not None and self.key_norm is not None:
            yield WeightSlot(f"{prefix}.q_norm.weight", self.query_norm, self._config.norm_offset)
            yield WeightSlot(f"{prefix}.k_norm.weight", self.key_norm, self._config.norm_offset)
        if self._config.quantization is not None:
            yield from self._kv_scale_slots(prefix)

    def _kv_scale_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """The scales of a cache in FP8 by all the names that quantisers give them; many checkpoints have none."""
        for scale, names in zip(self._loaded_kv_scales, _KV_SCALE_NAMES, strict=True):
            for name in names:
                yield WeightSlot(f"{prefix}.{name}", scale, is_optional=True, is_drawn=False, is_positive=True)


@dataclass(frozen=True)
class MlpNames:
    """What a checkpoint calls the parts of a gated MLP; `gate_up` is one name where it has them as one matrix."""

    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"


class GatedMlp:
    """down(activation(gate) * up); gate and up are one matrix.

    Where ranks share it, it gives their sum, or of an expert, which `is_expert`, a rank's own part of that.
    """

    def __init__(
        self, blank: BlankWeights, inner_size: int, names: MlpNames, bias: bool = False, is_expert: bool = False
    ) -> None:
        self._ranks = ALONE if is_expert else blank.ranks
        hidden_size = blank.config.hidden_size
        self._activate = ACTIVATIONS[blank.config.activation]
        self._names = names
        size = 2 * inner_size // len(names.gate_up)
        self.gate_up = blank.linear(names.gate_up, [size] * len(names.gate_up), hidden_size, bias)
        self.down = blank.linear([names.down], [hidden_size], inner_size, bias)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [num_tokens, hidden_size]. Returns the same shape."""
        return self._ranks.sum(self.down.gated(self._activate, self.gate_up(x)))

    def projections(self) -> Iterator[Linear]:
        yield self.gate_up
        yield self.down

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield from linear_slots(self.gate_up, [f"{prefix}.{name}" for name in self._names.gate_up])
        yield from linear_slots(self.down, [f"{prefix}.{self._names.down}"])


def linear_slots(linear: Linear, names: Sequence[str], sizes: Sequence[int] | None = None) -> Iterator[WeightSlot]:
    """The parts of a projection under the names the checkpoint gives them: equal parts, or of the sizes given."""
    sizes = list(sizes or [linear.num_outputs // len(names)] * len(names))
    if isinstance(linear.held, StoredModules):
        yield from linear.held.slots()
    else:
        for name, weight in zip(names, linear.weight.split_with_sizes(sizes), strict=True):
            yield WeightSlot(f"{name}.weight", weight, axes=OF_MATRIX)
    if linear.bias is not None:
        for name, bias in zip(names, linear.bias.split_with_sizes(sizes), strict=True):
            yield WeightSlot(f"{name}.bias", bias, axes=OF_OUTPUTS)
