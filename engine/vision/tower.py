"""A vision tower: an image's patches in, vectors of the decoder's size for each of its tokens out.

Weights keep the checkpoint's names; attention is torch's own.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import interpolate, linear

from ..checkpoints.vision_config import VisionConfig
from ..checkpoints.weights import WeightSlot
from .image_size import Grid
from .tower_parts import BlankTower, Block, Layout, Merger, Rotary, new_merger
from .windows import Windows


class VisionTower:
    """Patch embedding, blocks, and what makes a token of `spatial_merge_size` squared patches."""

    def __init__(self, config: VisionConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self._dtype, self._device = dtype, device
        blank, size = BlankTower(config, dtype, device), config.hidden_size
        patch = (config.num_channels, config.temporal_patch_size, config.patch_size, config.patch_size)
        self._patches = blank.empty(size, *((config.patch_values,) if config.has_channels_last else patch))
        self._patch_biases = blank.empty(size) if config.has_patch_biases else None
        self._positions = None if config.position_side is None else blank.empty(config.position_side**2, size)
        axes = config.num_axis_positions
        self._axis_positions = None if axes is None else blank.empty(2, axes, size)
        self._patch_norm = blank.norm(size) if config.has_patch_norm else None
        self._blocks = [Block(blank, index) for index in range(config.depth)]
        self._final_norm = blank.norm(size) if config.has_final_norm else None
        self._merger = new_merger(blank)
        # By the index of the block that each stands behind.
        self._deepstack = {index: Merger(blank, norms_tokens=True) for index in config.deepstack_layers}
        self._frequencies = None if config.rope_theta is None else self._frequencies_of(config.rope_theta)

    def _frequencies_of(self, theta: float) -> Tensor:
        """[2, head_dim / 4] float32: by rows, and by columns."""
        head_dim = self.config.hidden_size // self.config.num_heads
        steps = torch.arange(0, head_dim, 4, dtype=torch.float32, device=self._device).repeat(2, 1)
        if self.config.has_frequencies_in_turns:
            steps[1] += 2
        return 1.0 / theta ** (steps / head_dim)

    def encode(self, pixels: Tensor) -> Tensor:
        """pixels: [height, width, channels] uint8, whole tokens.

        Returns [num_levels, num_tokens, out_hidden_size], the tokens row by row: what stands for them, then what is
        added to each after one of the decoder's first layers after the other.
        """
        config = self.config
        grid = Grid(pixels.shape[0] // config.factor, pixels.shape[1] // config.factor)
        side = max(grid) if config.window_size is None else config.window_size // config.factor
        windows = Windows.of(grid, side, config.spatial_merge_size**2)
        order = windows.order.to(self._device)
        x = _reordered(self._embedded(pixels, grid), order)
        layout = Layout(windows, None if self._frequencies is None else self._rotary(self._frequencies, grid, order))
        levels = self._empty(grid)
        deep = iter(levels[1:])
        for index, block in enumerate(self._blocks):
            x = block(x, layout)
            if (merger := self._deepstack.get(index)) is not None:
                next(deep).index_copy_(0, order, merger(x))
        if self._final_norm is not None:
            x = self._final_norm(x)
        levels[0].index_copy_(0, order, self._merger(x))
        return levels

    @torch.inference_mode()
    def encode_largest(self, max_tokens: int) -> Tensor:
        """`encode` a black image of as many tokens as there may be, up to so many."""
        config = self.config
        side = config.image_side or max(1, math.isqrt(min(config.max_tokens, max_tokens))) * config.factor
        return self.encode(torch.zeros(side, side, config.num_channels, dtype=torch.uint8))

    def room(self, num_vectors: int, max_tokens: int) -> Tensor:
        """As large as so many vectors, and those of an image beside them: see `encode_largest`."""
        of_image = self.config.num_levels * min(self.config.max_tokens, max_tokens)
        shape = (num_vectors + of_image, self.config.out_hidden_size)
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def nothing(self, grid: Grid) -> Tensor:
        """What stands for an image that cannot be seen: [num_levels, num_tokens, out_hidden_size] NaNs."""
        return self._empty(grid).fill_(torch.nan)

    def _empty(self, grid: Grid) -> Tensor:
        shape = (self.config.num_levels, grid.num_tokens, self.config.out_hidden_size)
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def _embedded(self, pixels: Tensor, grid: Grid) -> Tensor:
        """What patches are to the first block, token after token: [num_patches, hidden_size]."""
        patches = self.patches(pixels.to(self._device)).to(self._dtype)
        x = linear(patches, self._patches.flatten(1), self._patch_biases)
        if self._positions is not None:
            x = x + self._learned_positions(self._positions, grid)
        if self._axis_positions is not None:
            of_columns, of_rows = self._axis_positions
            rows, columns = self._places(grid).unbind(1)
            x = x + (of_columns[columns] + of_rows[rows])
        return x if self._patch_norm is None else self._patch_norm(x)

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
        if config.has_channels_last:
            return parts.permute(1, 4, 2, 5, 3, 6, 0).reshape(-1, config.patch_values)
        frames = parts.permute(1, 4, 2, 5, 0, 3, 6).unsqueeze(5)
        frames = frames.expand(*frames.shape[:5], config.temporal_patch_size, *frames.shape[6:])
        return frames.reshape(-1, config.patch_values)

    def _learned_positions(self, table: Tensor, grid: Grid) -> Tensor:
        """The table, drawn out or shrunk to an image's patches from corner to corner: [num_patches, hidden_size].

        Token after token, as `patches` has them.
        """
        side, merge = math.isqrt(len(table)), self.config.spatial_merge_size
        square = table.float().T.reshape(1, -1, side, side)
        shape = (grid.rows * merge, grid.columns * merge)
        drawn = interpolate(square, shape, mode="bilinear", align_corners=True)
        parts = drawn.view(-1, grid.rows, merge, grid.columns, merge).permute(1, 3, 2, 4, 0)
        return parts.reshape(-1, table.shape[1]).to(table.dtype)

    def _rotary(self, frequencies: Tensor, grid: Grid, order: Tensor) -> Rotary:
        """Of the patches' places, window after window."""
        angles = self._places(grid)[..., None].float() * frequencies
        # A head's parts: columns' and rows', or all of it.
        angles = angles.flip(1) if self.config.has_axes_apart else angles.flatten(1)[:, None]
        angles = torch.cat((angles, angles), dim=-1)
        angles = _reordered(angles.flatten(1), order).view(len(angles), 1, *angles.shape[1:])
        return Rotary(angles.cos(), angles.sin())

    def _places(self, grid: Grid) -> Tensor:
        """[num_patches, 2] int64: each patch's row and column, token after token."""
        merge = self.config.spatial_merge_size
        sides = [torch.arange(side * merge, device=self._device) for side in grid]
        y, x = (side.view(-1, merge) for side in sides)
        shape = (grid.rows, grid.columns, merge, merge)
        places = torch.stack((y[:, None, :, None].expand(shape), x[None, :, None, :].expand(shape)), dim=-1)
        return places.flatten(0, 3)

    @property
    def num_parameters(self) -> int:
        return sum(slot.destination.numel() for slot in self.weight_slots())

    def weight_slots(self) -> Iterator[WeightSlot]:
        names = self.config.names
        name = names.tower
        yield WeightSlot(f"{name}.{names.patches}.weight", self._patches)
        if self._patch_biases is not None:
            yield WeightSlot(f"{name}.{names.patches}.bias", self._patch_biases)
        if self._patch_norm is not None:
            yield from self._patch_norm.weight_slots(f"{name}.ln_pre")
        if self._positions is not None:
            yield WeightSlot(f"{name}.{names.positions}.weight", self._positions)
        if self._axis_positions is not None:
            yield WeightSlot(f"{name}.{names.positions}", self._axis_positions)
        for index, block in enumerate(self._blocks):
            yield from block.weight_slots(f"{name}.{names.blocks}.{index}")
        if self._final_norm is not None:
            yield from self._final_norm.weight_slots(f"{name}.post_layernorm")
        prefix = f"{name}.merger" if isinstance(self._merger, Merger) else names.projector
        yield from self._merger.weight_slots(prefix)
        for number, merger in enumerate(self._deepstack.values()):
            yield from merger.weight_slots(f"{name}.deepstack_merger_list.{number}")


def _reordered(x: Tensor, order: Tensor) -> Tensor:
    """Of what there is for each patch, token after token: the tokens in this order. x: [num_patches, any]."""
    return x.view(len(order), -1, x.shape[1])[order].flatten(0, 1)
