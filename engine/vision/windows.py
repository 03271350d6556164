"""Which patches of an image attend to each other."""

from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from .image_size import Grid


@dataclass(frozen=True)
class Windows:
    """An image cut into windows. order: [num_tokens] int64, its tokens window after window, those of one size together.

    `shapes`: for each of these sizes how many windows there are, and how many patches each has.
    """

    order: Tensor
    shapes: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, grid: Grid, side: int, patches_per_token: int) -> "Windows":
        """`side`: how many tokens a window's has; the last of a row or column may have less."""
        tokens = torch.arange(grid.num_tokens).view(*grid)
        orders, shapes = [], []
        for (top, bottom, height), (left, right, width) in product(_spans(grid.rows, side), _spans(grid.columns, side)):
            down, across = (bottom - top) // height, (right - left) // width
            region = tokens[top:bottom, left:right].reshape(down, height, across, width)
            orders.append(region.transpose(1, 2).flatten())
            shapes.append((down * across, height * width * patches_per_token))
        return cls(torch.cat(orders), tuple(shapes))


def _spans(length: int, side: int) -> list[tuple[int, int, int]]:
    """Where the whole windows begin and end, and then the rest; each with how long its windows are."""
    whole = length // side * side
    return [span for span in ((0, whole, side), (whole, length, length - whole)) if span[0] < span[1]]
