"""What every way to multiply by a weight looks like."""

from abc import ABC, abstractmethod
from collections.abc import Callable

from torch import Tensor


class Product(ABC):
    """x @ weightᵀ + bias, with a weight and bias that it holds in a layout of its own."""

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """x: [n, in], of the dtype the product was made for. Returns [n, out] of that dtype; changes nothing."""

    def gated(self, activate: Callable[[Tensor], Tensor], gate_up: Tensor) -> Tensor:
        """The same of activate(gate_up), both in one where a product can. gate_up: [n, 2 * in], gates first."""
        return self(activate(gate_up))
