"""Products to which some of the rows have something added on the GPU: LoRA adapters' matrices, each in its slot."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ..lora import AdapterMatrices, TokenTiles
from .product import Product


class SlottedRows:
    """Which rows of a step have which adapter; the same for all products of a model."""

    def __init__(self) -> None:
        self.tiles: TokenTiles | None = None

    @contextmanager
    def having(self, tiles: TokenTiles) -> Iterator[None]:
        """Until it is left, products add what the adapters of `tiles` do; before and after that, nothing."""
        self.tiles = tiles
        try:
            yield
        finally:
            self.tiles = None


class SlottedProduct(Product):
    """Another product and what adapters add to it. See `Product`."""

    def __init__(self, product: Product, rows: SlottedRows, matrices: AdapterMatrices) -> None:
        self.product = product
        self._rows, self._matrices = rows, matrices

    def __call__(self, x: Tensor) -> Tensor:
        from ..lora.triton import add_low_rank_triton

        output = self.product(x)
        if self._rows.tiles is not None:
            add_low_rank_triton(output, x, self._matrices, self._rows.tiles)
        return output

    def gated(self, activate: Callable[[Tensor], Tensor], gate_up: Tensor) -> Tensor:
        """Where nothing is added, as the product does it."""
        if self._rows.tiles is None:
            return self.product.gated(activate, gate_up)
        return super().gated(activate, gate_up)

    def scratch_bytes(self, num_rows: int, dtype: torch.dtype) -> int:
        return self.product.scratch_bytes(num_rows, dtype)
