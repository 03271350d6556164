"""What blocks are made of: numbers of a few bits, and scales. Blocks are [n, bytes of a block] uint8."""

import torch
from torch import Tensor

# Bytes of a float16.
HALF = 2


def half(blocks: Tensor, at: int) -> Tensor:
    """The float16 that begins at this byte: [n, 1]."""
    return blocks[:, at : at + HALF].contiguous().view(torch.float16)


def halves(packed: Tensor) -> Tensor:
    """Bytes whose low halves are the first values, whose high ones the others: [n, 2 * bytes]."""
    return torch.cat((packed & 15, packed >> 4), dim=1)


def fields(packed: Tensor, bits: int, width: int) -> Tensor:
    """Runs of `width` bytes: the lowest `bits` of all of them, then the next, and so on: [n, bytes * 8 / bits]."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8).view(1, 1, -1, 1)
    runs = packed.reshape(len(packed), -1, 1, width)
    return (runs >> shifts & (1 << bits) - 1).flatten(1)


def scaled(values: Tensor, scales: Tensor, minima: Tensor | None = None) -> Tensor:
    """Neighbours share a scale, and a minimum that is taken off: [n, size]; of both [n, num_groups]."""
    groups = values.view(len(values), scales.shape[1], -1) * scales.unsqueeze(-1)
    return (groups if minima is None else groups - minima.unsqueeze(-1)).flatten(1)
