"""What vision towers are built of: products, norms, MLPs, attention, and mergers of patches into tokens."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, scaled_dot_product_attention, silu

from ...kernels.layer_norm import layer_norm
from ...kernels.norm_rotary import rms_norm
from ..checkpoints.vision_config import PoolConfig, ProjectorConfig, ScaledPoolConfig, VisionConfig
from ..checkpoints.weights import WeightSlot
from .windows import Windows


def _quick_gelu(x: Tensor) -> Tensor:
    return x * (1.702 * x).sigmoid()


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": partial(gelu, approximate="tanh"),
    "quick_gelu": _quick_gelu,
}


@dataclass(frozen=True)
class Affine:
    """x → x · weightᵀ + bias."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)

    def weight_slots(self, *names: str) -> Iterator[WeightSlot]:
        """names: of equal parts, one below the other."""
        for name, weight in zip(names, self.weight.chunk(len(names)), strict=True):
            yield WeightSlot(f"{name}.weight", weight)
        if self.bias is not None:
            for name, bias in zip(names, self.bias.chunk(len(names)), strict=True):
                yield WeightSlot(f"{name}.bias", bias)


@dataclass(frozen=True)
class LimitedAffine:
    """Parts side by side whose inputs and outputs are kept within limits: [num_parts, 4], of both least and most."""

    parts: Sequence[Affine]
    limits: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        outputs = []
        for part, (low, high, least, most) in zip(self.parts, self.limits.unbind(), strict=True):
            outputs.append(part(x.clamp(low, high)).clamp(least, most))
        return torch.cat(outputs, dim=-1)

    def weight_slots(self, *names: str) -> Iterator[WeightSlot]:
        for name, part, limits in zip(names, self.parts, self.limits, strict=True):
            yield from part.weight_slots(name)
            for kind, limit in zip(_LIMITS, limits, strict=True):
                yield WeightSlot(f"{name.removesuffix('.linear')}.{kind}", limit, is_drawn=False)


_LIMITS = ("input_min", "input_max", "output_min", "output_max")


@dataclass(frozen=True)
class Norm:
    """By the root mean square, or with a bias by mean and variance."""

    weight: Tensor
    bias: Tensor | None
    eps: float
    # Of the weight over the checkpoint's.
    offset: float = 0.0

    def __call__(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return rms_norm(x, self.weight, self.eps)
        return layer_norm(x, self.weight, self.bias, self.eps)

    def weight_slots(self, name: str) -> Iterator[WeightSlot]:
        yield WeightSlot(f"{name}.weight", self.weight, self.offset)
        if self.bias is not None:
            yield WeightSlot(f"{name}.bias", self.bias)


@dataclass(frozen=True)
class BlankTower:
    """Makes a tower's weights, which are still to be filled."""

    config: VisionConfig
    dtype: torch.dtype
    device: torch.device

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def affine(self, num_outputs: int, num_inputs: int, has_bias: bool = True) -> Affine:
        return Affine(self.empty(num_outputs, num_inputs), self.empty(num_outputs) if has_bias else None)

    def of_block(self, num_outputs: int, num_inputs: int, num_parts: int = 1) -> Affine | LimitedAffine:
        """A matrix, or several equal ones side by side, of a block."""
        if not self.config.has_limits:
            return self.affine(num_parts * num_outputs, num_inputs, self.config.has_biases)
        parts = [self.affine(num_outputs, num_inputs, self.config.has_biases) for _ in range(num_parts)]
        # Where nothing is loaded there are none.
        limits = torch.tensor([-torch.inf, torch.inf] * 2, dtype=self.dtype, device=self.device)
        return LimitedAffine(parts, limits.repeat(num_parts, 1))

    def norm(self, size: int) -> Norm:
        bias = self.empty(size) if self.config.has_layer_norms else None
        return Norm(self.empty(size), bias, self.config.norm_eps)


class Mlp:
    """out(activation(in)), or out(activation(gate) · in)."""

    def __init__(self, blank: BlankTower) -> None:
        config = blank.config
        self._activate = _ACTIVATIONS[config.activation]
        *self._names, self._out_name = config.names.mlp
        hidden, inner = config.hidden_size, config.intermediate_size
        self._into = [blank.of_block(inner, hidden) for _ in self._names]
        self._out = blank.of_block(hidden, inner)

    def __call__(self, x: Tensor) -> Tensor:
        first, *others = (each(x) for each in self._into)
        inner = self._activate(first)
        for other in others:
            inner = inner * other
        return self._out(inner)

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        for name, affine in zip(self._names, self._into, strict=True):
            yield from affine.weight_slots(f"{prefix}.{name}")
        yield from self._out.weight_slots(f"{prefix}.{self._out_name}")


class Rotary(NamedTuple):
    """What patches' queries and keys are rotated by: cosines and sines, [num_patches, 1, parts, size] float32.

    Of parts of a head, each of which is rotated by itself.
    """

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True)
class Layout:
    """What all layers need to know of an image. rotary: of patches in window order, where these are rotated."""

    windows: Windows
    rotary: Rotary | None


class Block:
    """Attention and an MLP, each after a norm, and before another one where there are more."""

    def __init__(self, blank: BlankTower, index: int) -> None:
        config, size = blank.config, blank.config.hidden_size
        self._num_heads = config.num_heads
        self._is_full = config.window_size is None or index in config.full_attention_layers
        self._names = config.names
        self._norms = [blank.norm(size) for _ in config.names.norms]
        self._qkv = blank.of_block(size, size, num_parts=3)
        self._output = blank.of_block(size, size)
        self._head_norms = HeadNorms(blank) if config.has_head_norms else None
        self._scale = 1.0 if config.has_head_norms else None
        self._mlp = Mlp(blank)

    def __call__(self, x: Tensor, layout: Layout) -> Tensor:
        """x: [num_patches, hidden_size], window after window."""
        if len(self._norms) == 2:
            before_attention, before_mlp = self._norms
            x = x + self._attend(before_attention(x), layout)
            return x + self._mlp(before_mlp(x))
        before_attention, behind_attention, before_mlp, behind_mlp = self._norms
        x = x + behind_attention(self._attend(before_attention(x), layout))
        return x + behind_mlp(self._mlp(before_mlp(x)))

    def _attend(self, x: Tensor, layout: Layout) -> Tensor:
        query, key, value = self._qkv(x).view(len(x), 3, self._num_heads, -1).unbind(1)
        if self._head_norms is not None:
            query, key, value = self._head_norms(query, key, value)
        if layout.rotary is not None:
            query, key = (_rotated(each, layout.rotary) for each in (query, key))
        shapes = [(1, len(x))] if self._is_full else layout.windows.shapes
        sizes = [number * length for number, length in shapes]
        split = zip(*(each.split_with_sizes(sizes) for each in (query, key, value)), strict=True)
        parts = [_attention(qkv, shape, self._scale) for shape, qkv in zip(shapes, split, strict=True)]
        return self._output(torch.cat(parts))

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        names = self._names
        for name, norm in zip(names.norms, self._norms, strict=True):
            yield from norm.weight_slots(f"{prefix}.{name}")
        yield from self._qkv.weight_slots(*(f"{prefix}.{name}" for name in names.qkv))
        yield from self._output.weight_slots(f"{prefix}.{names.output}")
        if self._head_norms is not None:
            yield from self._head_norms.weight_slots(f"{prefix}.self_attn")
        yield from self._mlp.weight_slots(f"{prefix}.{names.mlp_module}")


class HeadNorms:
    """Of each head's queries, keys and values; those of values have no weights."""

    def __init__(self, blank: BlankTower) -> None:
        head_dim = blank.config.hidden_size // blank.config.num_heads
        self._query, self._key = blank.norm(head_dim), blank.norm(head_dim)
        self._value = Norm(torch.ones_like(self._key.weight), None, blank.config.norm_eps)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Each [num_patches, heads, head_dim]."""
        norms = ((self._query, query), (self._key, key), (self._value, value))
        normed = [norm(x.reshape(-1, x.shape[2])).view(x.shape) for norm, x in norms]
        return normed[0], normed[1], normed[2]

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield from self._query.weight_slots(f"{prefix}.q_norm")
        yield from self._key.weight_slots(f"{prefix}.k_norm")


class Merger:
    """Makes a token of the patches that lie in it, normed each for itself or, where it `norms_tokens`, together."""

    def __init__(self, blank: BlankTower, norms_tokens: bool = False) -> None:
        config, merged = blank.config, blank.config.merged_size
        self._names, self._merged_size = config.names.merger, merged
        self._norm_size = merged if norms_tokens else config.hidden_size
        self._norm = blank.norm(self._norm_size)
        self._in = blank.affine(merged, merged)
        self._out = blank.affine(config.out_hidden_size, merged)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [num_patches, hidden_size], token after token. Returns [num_tokens, out_hidden_size]."""
        normed = self._norm(x.view(-1, self._norm_size))
        return self._out(gelu(self._in(normed.view(-1, self._merged_size))))

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        norm, into, out = self._names
        yield from self._norm.weight_slots(f"{prefix}.{norm}")
        yield from self._in.weight_slots(f"{prefix}.{into}")
        yield from self._out.weight_slots(f"{prefix}.{out}")


class Projector:
    """Mistral's: makes one patch of those that lie in a token, and of it what the decoder takes."""

    def __init__(self, blank: BlankTower, projector: ProjectorConfig) -> None:
        config, size, out = blank.config, blank.config.hidden_size, blank.config.out_hidden_size
        self._merged_patches = config.spatial_merge_size**2
        self._norm = Norm(blank.empty(size), None, projector.norm_eps)
        self._merge = blank.affine(size, config.merged_size, has_bias=False)
        self._in = blank.affine(out, size, projector.has_biases)
        self._out = blank.affine(out, out, projector.has_biases)

    def __call__(self, x: Tensor) -> Tensor:
        """As `Merger`."""
        # Each number of all patches, then the next.
        merged = self._norm(x).view(-1, self._merged_patches, x.shape[1]).transpose(1, 2).flatten(1)
        return self._out(gelu(self._in(self._merge(merged))))

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield from self._norm.weight_slots(f"{prefix}.norm")
        yield from self._merge.weight_slots(f"{prefix}.patch_merger.merging_layer")
        yield from self._in.weight_slots(f"{prefix}.linear_1")
        yield from self._out.weight_slots(f"{prefix}.linear_2")


class Pool:
    """Gemma 3's: the mean of the patches that lie in a token, and of it what the decoder takes."""

    def __init__(self, blank: BlankTower, pool: PoolConfig) -> None:
        config = blank.config
        self._merged_patches = config.spatial_merge_size**2
        # In float32, as what one is added to would lose most of a small number.
        weight = torch.empty(config.hidden_size, dtype=torch.float32, device=blank.device)
        self._norm = Norm(weight, None, pool.norm_eps, offset=1.0)
        self._out = blank.affine(config.out_hidden_size, config.hidden_size, has_bias=False)

    def __call__(self, x: Tensor) -> Tensor:
        """As `Merger`."""
        return self._out(self._norm(x.view(-1, self._merged_patches, x.shape[1]).mean(1)))

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield from self._norm.weight_slots(f"{prefix}.mm_soft_emb_norm")
        # Inputs before outputs, as no other matrix.
        yield WeightSlot(f"{prefix}.mm_input_projection_weight", self._out.weight.mT)


class ScaledPool:
    """Gemma 4's: the same, with numbers made large and brought to one measure."""

    def __init__(self, blank: BlankTower, pool: ScaledPoolConfig) -> None:
        config = blank.config
        self._tower, self._merged_patches = config.names.tower, config.spatial_merge_size**2
        self._scale = config.hidden_size**0.5
        self._standard = blank.empty(2, config.hidden_size) if pool.is_standardized else None
        self._norm = Norm(torch.ones(config.hidden_size, dtype=blank.dtype, device=blank.device), None, config.norm_eps)
        self._out = blank.affine(config.out_hidden_size, config.hidden_size, has_bias=False)

    def __call__(self, x: Tensor) -> Tensor:
        """As `Merger`."""
        pooled = x.view(-1, self._merged_patches, x.shape[1]).float().mean(1).to(x.dtype).float() * self._scale
        if self._standard is not None:
            bias, factor = self._standard.float()
            pooled = (pooled - bias) * factor
        return self._out(self._norm(pooled.to(x.dtype)))

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        if self._standard is not None:
            for name, numbers in zip(("std_bias", "std_scale"), self._standard, strict=True):
                yield WeightSlot(f"{self._tower}.{name}", numbers)
        yield from self._out.weight_slots(f"{prefix}.embedding_projection")


def new_merger(blank: BlankTower) -> Merger | Projector | Pool | ScaledPool:
    """What makes an image's tokens of its patches."""
    match blank.config.projector:
        case ProjectorConfig() as projector:
            return Projector(blank, projector)
        case PoolConfig() as pool:
            return Pool(blank, pool)
        case ScaledPoolConfig() as pool:
            return ScaledPool(blank, pool)
    return Merger(blank)


def _rotated(x: Tensor, rotary: Rotary) -> Tensor:
    wide = x.float().view(*x.shape[:2], *rotary.cos.shape[2:])
    left, right = wide.chunk(2, dim=-1)
    rotated = wide * rotary.cos + torch.cat((-right, left), dim=-1) * rotary.sin
    return rotated.view(x.shape).to(x.dtype)


def _attention(qkv: Sequence[Tensor], shape: tuple[int, int], scale: float | None) -> Tensor:
    """Within windows, of which there are so many, each of so many patches.

    qkv: three times [num_patches, heads, head_dim]. Returns [num_patches, heads · head_dim].
    """
    query, key, value = (each.view(*shape, *each.shape[1:]).transpose(1, 2) for each in qkv)
    attended = scaled_dot_product_attention(query, key, value, scale=scale)
    return attended.transpose(1, 2).flatten(2).flatten(0, 1)
