"""Products to which some of the rows have something added: LoRA adapters' low-rank matrices, side by side."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from .product import Product


@dataclass(frozen=True)
class Addition:
    """x @ downᵀ @ up to a part of the outputs. down: [rank, in]; up: [rank, size], for the outputs from `start` on.

    The rank is that of all adapters together.
    """

    start: int
    down: Tensor
    up: Tensor


class AdaptedRows:
    """Which of the adapters' columns each row of a step is without; the same for all products of a model."""

    def __init__(self) -> None:
        self._foreign: dict[int, Tensor] = {}

    @contextmanager
    def without(self, foreign: Tensor, of_fewer: Tensor | None = None) -> Iterator[None]:
        """Until it is left, products add what is not `foreign`: [num_rows, rank] bool.

        of_fewer: the same of products that get fewer rows.
        """
        self._foreign = {len(each): each for each in (of_fewer, foreign) if each is not None}
        try:
            yield
        finally:
            self._foreign = {}

    def of(self, num_rows: int) -> Tensor | None:
        """[num_rows, rank] bool; None where no row has anything added."""
        return self._foreign[num_rows] if self._foreign else None


class AdaptedProduct(Product):
    """Another product and additions to it, one or more. See `Product`."""

    def __init__(self, product: Product, rows: AdaptedRows, additions: Sequence[Addition]) -> None:
        self.product = product
        self._rows = rows
        self._down = torch.cat([each.down for each in additions])
        self._ups = [(each.start, each.start + each.up.shape[1], each.up) for each in additions]

    def __call__(self, x: Tensor) -> Tensor:
        output = self.product(x)
        if (foreign := self._rows.of(len(x))) is None:
            return output
        num_rows, rank = foreign.shape
        low = linear(x, self._down).view(num_rows, len(self._ups), rank)
        # Not times zero: what others' matrices make of a row need not be finite.
        low.masked_fill_(foreign.unsqueeze(1), 0)
        for index, (start, end, up) in enumerate(self._ups):
            output[:, start:end].addmm_(low[:, index], up)
        return output

    def gated(self, activate: Callable[[Tensor], Tensor], gate_up: Tensor) -> Tensor:
        """Where nothing is added, as the product does it."""
        if self._rows.of(len(gate_up)) is None:
            return self.product.gated(activate, gate_up)
        return super().gated(activate, gate_up)

    def scratch_bytes(self, num_rows: int, dtype: torch.dtype) -> int:
        return self.product.scratch_bytes(num_rows, dtype)
