"""How many tokens an image becomes, by its size alone. Free of torch."""

import math
from typing import NamedTuple

from ..checkpoints.vision_config import VisionConfig
from ..errors import InvalidRequestError

MAX_ASPECT_RATIO = 200
# More are refused before they are decoded: a file of some kilobytes can claim to be gigabytes of pixels.
MAX_IMAGE_PIXELS = 2**26


class Grid(NamedTuple):
    """An image's tokens: so many rows and columns of them."""

    rows: int
    columns: int

    @property
    def num_tokens(self) -> int:
        return self.rows * self.columns


def token_grid(height: int, width: int, config: VisionConfig) -> Grid:
    """Of an image of so many pixels. Raises `InvalidRequestError` for one that cannot be shown to the model."""
    check_size(height, width)
    resized_height, resized_width = resized(height, width, config)
    return Grid(resized_height // config.factor, resized_width // config.factor)


def num_places(grid: Grid, config: VisionConfig) -> int:
    """How many tokens of a prompt an image takes, what ends its rows included, but not a frame."""
    return grid.num_tokens + (0 if config.row_ends is None else grid.rows)


def check_size(height: int, width: int) -> None:
    """Raises `InvalidRequestError` for an image with too many pixels, or too long and thin."""
    if height * width > MAX_IMAGE_PIXELS:
        raise InvalidRequestError(
            f"has {width}×{height} pixels, more than {MAX_IMAGE_PIXELS} together: scale it down", "image"
        )
    if not height or not width or max(height, width) > MAX_ASPECT_RATIO * min(height, width):
        raise InvalidRequestError(
            f"has {width}×{height} pixels: one side may be at most {MAX_ASPECT_RATIO} times the other", "image"
        )


def resized(height: int, width: int, config: VisionConfig) -> tuple[int, int]:
    """The height and width that an image is scaled to: multiples of a token's, its shape mostly kept.

    The rule of Qwen2-VL's `smart_resize`, Pixtral's or Gemma 4's; of Gemma 3 a square, whatever the shape.
    """
    factor = config.factor
    if config.image_side is not None:
        return config.image_side, config.image_side
    if config.longest_edge is not None:
        shrink = max(max(height, width) / config.longest_edge, 1)
        height, width = (max(math.floor(side / shrink), 1) for side in (height, width))
        return -(-height // factor) * factor, -(-width // factor) * factor
    if config.fills_pixels:
        return _filling(height, width, config)
    new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
    if new_height * new_width > config.max_pixels:
        shrink = math.sqrt(height * width / config.max_pixels)
        new_height = max(factor, math.floor(height / shrink / factor) * factor)
        new_width = max(factor, math.floor(width / shrink / factor) * factor)
    elif new_height * new_width < config.min_pixels:
        grow = math.sqrt(config.min_pixels / (height * width))
        new_height, new_width = (math.ceil(side * grow / factor) * factor for side in (height, width))
    return new_height, new_width


def _filling(height: int, width: int, config: VisionConfig) -> tuple[int, int]:
    """Gemma 4's rule: as large as it may be, both sides rounded down; a side of nothing becomes one token's."""
    factor = config.factor
    grow = math.sqrt(config.max_pixels / (height * width))
    rows, columns = (math.floor(side * grow / factor) for side in (height, width))
    if not rows:
        rows, columns = 1, min(width // height, config.max_tokens)
    elif not columns:
        rows, columns = min(height // width, config.max_tokens), 1
    return rows * factor, columns * factor
