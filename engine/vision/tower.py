"""The vision tower of Qwen2.5-VL: an image's patches in, one vector of the decoder's size for each of its tokens out.

Weights keep the checkpoint's names; attention is torch's own.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, scaled_dot_product_attention, silu

from ...kernels.norm_rotary import rms_norm
from ..checkpoints.vision_config import VisionConfig
from ..checkpoints.weights import WeightSlot
from .image_size import Grid
from .windows import Windows

_EPS = 1e-6
_ROPE_THETA = 10000.0


@dataclass(frozen=True)
class _Affine:
    """x → x · weightᵀ + bias."""

    weight: Tensor
    bias: Tensor

    @classmethod
    def blank(cls, num_outputs: int, num_inputs: int, dtype: torch.dtype, device: torch.device) -> "_Affine":
        weight = torch.empty(num_outputs, num_inputs, dtype=dtype, device=device)
        return cls(weight, torch.empty(num_outputs, dtype=dtype, device=device))

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)

    def weight_slots(self, name: str) -> Iterator[WeightSlot]:
        yield WeightSlot(f"{name}.weight", self.weight)
        yield WeightSlot(f"{name}.bias", self.bias)


@dataclass(frozen=True)
class _Layout:
    """What all layers need to know of an image. cos, sin: [num_patches, 1, head_dim], of patches in window order."""

    windows: Windows
    cos: Tensor
    sin: Tensor


class _Block:
    """Attention and a gated MLP, each after a norm."""

    def __init__(self, config: VisionConfig, index: int, dtype: torch.dtype, device: torch.device) -> None:
        size, inner = config.hidden_size, config.intermediate_size
        self._num_heads = config.num_heads
        self._is_full = index in config.full_attention_layers
        self._norms = [torch.empty(size, dtype=dtype, device=device) for _ in range(2)]
        self._qkv = _Affine.blank(3 * size, size, dtype, device)
        self._output = _Affine.blank(size, size, dtype, device)
        self._gate = _Affine.blank(inner, size, dtype, device)
        self._up = _Affine.blank(inner, size, dtype, device)
        self._down = _Affine.blank(size, inner, dtype, device)

    def __call__(self, x: Tensor, layout: _Layout) -> Tensor:
        """x: [num_patches, hidden_size], window after window."""
        x = x + self._attend(rms_norm(x, self._norms[0], _EPS), layout)
        normed = rms_norm(x, self._norms[1], _EPS)
        return x + self._down(silu(self._gate(normed)) * self._up(normed))

    def _attend(self, x: Tensor, layout: _Layout) -> Tensor:
        query, key, value = self._qkv(x).view(len(x), 3, self._num_heads, -1).unbind(1)
        query, key = (_rotated(each, layout.cos, layout.sin) for each in (query, key))
        shapes = [(1, len(x))] if self._is_full else layout.windows.shapes
        sizes = [number * length for number, length in shapes]
        split = zip(*(each.split_with_sizes(sizes) for each in (query, key, value)), strict=True)
        parts = [_attention(qkv, shape) for shape, qkv in zip(shapes, split, strict=True)]
        return self._output(torch.cat(parts))

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield WeightSlot(f"{prefix}.norm1.weight", self._norms[0])
        yield WeightSlot(f"{prefix}.norm2.weight", self._norms[1])
        yield from self._qkv.weight_slots(f"{prefix}.attn.qkv")
        yield from self._output.weight_slots(f"{prefix}.attn.proj")
        yield from self._gate.weight_slots(f"{prefix}.mlp.gate_proj")
        yield from self._up.weight_slots(f"{prefix}.mlp.up_proj")
        yield from self._down.weight_slots(f"{prefix}.mlp.down_proj")


class VisionTower:
    """Patch embedding, blocks, and the merger that makes a token of `spatial_merge_size` squared patches."""

    def __init__(self, config: VisionConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self._dtype, self._device = dtype, device
        patch = (config.num_channels, config.temporal_patch_size, config.patch_size, config.patch_size)
        self._patches = torch.empty(config.hidden_size, *patch, dtype=dtype, device=device)
        self._blocks = [_Block(config, index, dtype, device) for index in range(config.depth)]
        merged = config.hidden_size * config.spatial_merge_size**2
        self._merge_norm = torch.empty(config.hidden_size, dtype=dtype, device=device)
        self._merge_in = _Affine.blank(merged, merged, dtype, device)
        self._merge_out = _Affine.blank(config.out_hidden_size, merged, dtype, device)
        spatial_dim = config.hidden_size // config.num_heads // 2
        steps = torch.arange(0, spatial_dim, 2, dtype=torch.float32, device=device) / spatial_dim
        self._frequencies = 1.0 / _ROPE_THETA**steps

    def encode(self, pixels: Tensor) -> Tensor:
        """pixels: [height, width, channels] uint8, whole tokens. Returns [num_tokens, out_hidden_size], row by row."""
        config = self.config
        grid = Grid(pixels.shape[0] // config.factor, pixels.shape[1] // config.factor)
        windows = Windows.of(grid, config.window_size // config.factor, config.spatial_merge_size**2)
        order = windows.order.to(self._device)
        x = linear(self.patches(pixels.to(self._device)).to(self._dtype), self._patches.flatten(1))
        x = _reordered(x, order)
        layout = _Layout(windows, *self._rotary(grid, order))
        for block in self._blocks:
            x = block(x, layout)
        x = rms_norm(x, self._merge_norm, _EPS).view(len(order), -1)
        merged = self._merge_out(gelu(self._merge_in(x)))
        return torch.empty_like(merged).index_copy_(0, order, merged)

    @torch.inference_mode()
    def encode_largest(self, max_tokens: int) -> Tensor:
        """`encode` a black image of as many tokens as there may be, up to so many."""
        config = self.config
        side = max(1, math.isqrt(min(config.max_pixels // config.factor**2, max_tokens))) * config.factor
        return self.encode(torch.zeros(side, side, config.num_channels, dtype=torch.uint8))

    def nothing(self, grid: Grid) -> Tensor:
        """What stands for an image that cannot be seen: [num_tokens, out_hidden_size] NaNs."""
        shape = (grid.num_tokens, self.config.out_hidden_size)
        return torch.full(shape, torch.nan, dtype=self._dtype, device=self._device)

    def patches(self, pixels: Tensor) -> Tensor:
        """[num_patches, patch_values] float32: normalised, token after token, and in each row by row.

        A patch is of `temporal_patch_size` frames, which of an image are the same.
        """
        config = self.config
        mean, std = (torch.tensor(each, device=pixels.device) for each in (config.image_mean, config.image_std))
        normed = ((pixels.float() / 255 - mean) / std).permute(2, 0, 1)
        size, merge = config.patch_size, config.spatial_merge_size
        height, width = (side // config.factor for side in pixels.shape[:2])
        parts = normed.reshape(-1, height, merge, size, width, merge, size)
        # channel, row, row in the token, y, column, column in the token, x
        frames = parts.permute(1, 4, 2, 5, 0, 3, 6).unsqueeze(5)
        frames = frames.expand(*frames.shape[:5], config.temporal_patch_size, *frames.shape[6:])
        return frames.reshape(-1, config.patch_values)

    def _rotary(self, grid: Grid, order: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the patches' places, [num_patches, 1, head_dim] float32, window after window."""
        merge = self.config.spatial_merge_size
        sides = [torch.arange(side * merge, device=self._device) for side in grid]
        y, x = (side.view(-1, merge) for side in sides)
        shape = (grid.rows, grid.columns, merge, merge)
        places = torch.stack((y[:, None, :, None].expand(shape), x[None, :, None, :].expand(shape)), dim=-1)
        angles = places.flatten(0, 3)[..., None].float() * self._frequencies
        angles = _reordered(angles.flatten(1), order)
        angles = torch.cat((angles, angles), dim=-1)[:, None]
        return angles.cos(), angles.sin()

    @property
    def num_parameters(self) -> int:
        return sum(slot.destination.numel() for slot in self.weight_slots())

    def weight_slots(self) -> Iterator[WeightSlot]:
        yield WeightSlot("visual.patch_embed.proj.weight", self._patches)
        for index, block in enumerate(self._blocks):
            yield from block.weight_slots(f"visual.blocks.{index}")
        yield WeightSlot("visual.merger.ln_q.weight", self._merge_norm)
        yield from self._merge_in.weight_slots("visual.merger.mlp.0")
        yield from self._merge_out.weight_slots("visual.merger.mlp.2")


def _reordered(x: Tensor, order: Tensor) -> Tensor:
    """Of what there is for each patch, token after token: the tokens in this order. x: [num_patches, any]."""
    return x.view(len(order), -1, x.shape[1])[order].flatten(0, 1)


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
