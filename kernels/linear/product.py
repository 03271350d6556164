"""What every way to multiply by a weight looks like."""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor


class Product(ABC):
    """x @ weightᵀ + bias, with a weight and bias that it holds in a layout of its own."""

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """x: [n, in], of the dtype the product was made for. Returns [n, out] of that dtype; changes nothing."""

    def gated(self, activate: Callable[[Tensor], Tensor], gate_up: Tensor) -> Tensor:
        """The same of activate(gate_up), both in one where a product can. gate_up: [n, 2 * in], gates first."""
        return self(activate(gate_up))

    def scratch_bytes(self, num_rows: int, dtype: torch.dtype) -> int:
        """About what so many rows of `dtype` take for a moment beside what is returned, and that their number tells
        little about.
        """
        return 0
