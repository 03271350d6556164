"""Which part of a checkpoint's tensor a process holds, where a model is split over several."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Axis(NamedTuple):
    """A dimension of a stored tensor; one place of it stands for `unit` outputs, or inputs, of the matrix."""

    dim: int
    unit: int = 1


class Axes(NamedTuple):
    """Where a stored tensor has its matrix's outputs and inputs; None: it has one value for all of them."""

    outputs: Axis | None = None
    inputs: Axis | None = None


WHOLE = Axes()
OF_MATRIX = Axes(Axis(0), Axis(1))
OF_OUTPUTS = Axes(Axis(0))


@dataclass(frozen=True)
class Cut:
    """Of dimension `dim` of a tensor of this shape the ranges (from, to), one after the other.

    Without any it is nothing of it, and zeros take its place.
    """

    shape: tuple[int, ...]
    dim: int
    ranges: tuple[tuple[int, int], ...]

    def of(self, tensor: Tensor) -> Tensor:
        """tensor: of the whole shape, in memory."""
        return self._joined([tensor.narrow(self.dim, start, end - start) for start, end in self.ranges])

    def of_same(self, tensor: Tensor) -> Tensor:
        """As `of`; raises `ValueError` where the tensor's shape is another."""
        self._require(tuple(tensor.shape))
        return self.of(tensor.reshape(self.shape))

    def read(self, stored: Any, may_be_turned: bool = False) -> Tensor:
        """stored: a slice of an open safetensors file, of which no more is read than this.

        Raises `ValueError` where its shape is another; its last two dimensions may be the other way round if it
        `may_be_turned`.
        """
        found = tuple(stored.get_shape())
        if may_be_turned and found == (turned := self._turned()).shape != self.shape:
            return turned.read(stored).mT
        self._require(found)
        if found != self.shape:
            return self.of(stored[:].reshape(self.shape))
        before = (slice(None),) * self.dim
        return self._joined([stored[(*before, slice(start, end))] for start, end in self.ranges])

    def _turned(self) -> "Cut":
        """Of a tensor whose last two dimensions are the other way round."""
        *before, rows, columns = self.shape
        dims = [*range(len(before)), len(before) + 1, len(before)]
        return Cut((*before, columns, rows), dims[self.dim], self.ranges)

    def _require(self, found: tuple[int, ...]) -> None:
        if without_ones(found) != without_ones(self.shape):
            raise ValueError(f"shape {found}; config.json asks for {self.shape}")

    def _joined(self, parts: list[Tensor]) -> Tensor:
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)


def without_ones(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)
