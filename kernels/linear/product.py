"""What every way to multiply by a weight looks like."""

from typing import Protocol

from torch import Tensor


class Product(Protocol):
    """x @ weightᵀ + bias, with a weight and bias that it holds in a layout of its own."""

    def __call__(self, x: Tensor) -> Tensor:
        """x: [n, in], of the dtype the product was made for. Returns [n, out] of that dtype; changes nothing."""
