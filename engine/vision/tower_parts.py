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
from ..checkpoints.vision_config import PoolConfig, ProjectorConfig, VisionConfig
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

    def norm(self, size: int) -> Norm:
        bias = self.empty(size) if self.config.has_layer_norms else None
        return Norm(self.empty(size), bias, self.config.norm_eps)


class Mlp:
    """out(activation(in)), or out(activation(gate) · in)."""

    def __init__(self, blank: BlankTower) -> None:
        config = blank.config
        self._activate = _ACTIVATIONS[config.activation]
        *self._names, self._out_name = config.names.mlp
        hidden, inner, has_bias = config.hidden_size, config.intermediate_size, config.has_biases
        self._into = [blank.affine(inner, hidden, has_bias) for _ in self._names]
        self._out = blank.affine(hidden, inner, has_bias)

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
    """What patches' queries and keys are rotated by: cosines and sines, [num_patches, 1, head_dim] float32."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True)
class Layout:
    """What all layers need to know of an image. rotary: of patches in window order, where these are rotated."""

    windows: Windows
    rotary: Rotary | None


class Block:
    """Attention and an MLP, each after a norm."""

    def __init__(self, blank: BlankTower, index: int) -> None:
        config, size = blank.config, blank.config.hidden_size
        self._num_heads = config.num_heads
        self._is_full = config.window_size is None or index in config.full_attention_layers
        self._names = config.names
        self._norms = [blank.norm(size) for _ in range(2)]
        self._qkv = blank.affine(3 * size, size, config.has_biases)
        self._output = blank.affine(size, size, config.has_biases)
        self._mlp = Mlp(blank)

    def __call__(self, x: Tensor, layout: Layout) -> Tensor:
        """x: [num_patches, hidden_size], window after window."""
        x = x + self._attend(self._norms[0](x), layout)
        return x + self._mlp(self._norms[1](x))

    def _attend(self, x: Tensor, layout: Layout) -> Tensor:
        query, key, value = self._qkv(x).view(len(x), 3, self._num_heads, -1).unbind(1)
        if layout.rotary is not None:
            query, key = (_rotated(each, *layout.rotary) for each in (query, key))
        shapes = [(1, len(x))] if self._is_full else layout.windows.shapes
        sizes = [number * length for number, length in shapes]
        split = zip(*(each.split_with_sizes(sizes) for each in (query, key, value)), strict=True)
        parts = [_attention(qkv, shape) for shape, qkv in zip(shapes, split, strict=True)]
        return self._output(torch.cat(parts))

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        names = self._names
        for name, norm in zip(names.norms, self._norms, strict=True):
            yield from norm.weight_slots(f"{prefix}.{name}")
        yield from self._qkv.weight_slots(*(f"{prefix}.{name}" for name in names.qkv))
        yield from self._output.weight_slots(f"{prefix}.{names.output}")
        yield from self._mlp.weight_slots(f"{prefix}.{names.mlp_module}")


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
    """Gemma's: the mean of the patches that lie in a token, and of it what the decoder takes."""

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


def new_merger(blank: BlankTower) -> Merger | Projector | Pool:
    """What makes an image's tokens of its patches."""
    match blank.config.projector:
        case ProjectorConfig() as projector:
            return Projector(blank, projector)
        case PoolConfig() as pool:
            return Pool(blank, pool)
    return Merger(blank)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    wide = x.float()
    left, right = wide.chunk(2, dim=-1)
    return (wide * cos + torch.cat((-right, left), dim=-1) * sin).to(x.dtype)


def _attention(qkv: Sequence[Tensor], shape: tuple[int, int]) -> Tensor:
    """Within windows, of which there are so many, each of so many patches.

    qkv: three times [num_patches, heads, head_dim]. Returns [num_patches, heads · head_dim].
    """
    query, key, value = (each.view(*shape, *each.shape[1:]).transpose(1, 2) for each in qkv)
    return scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2).flatten(0, 1)
