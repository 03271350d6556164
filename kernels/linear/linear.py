"""A linear layer's weight, from a checkpoint's tensors to the product that is fastest here."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..lora import AdapterMatrices
from .adapted import AdaptedProduct, AdaptedRows, Addition
from .int8 import Int8Product
from .plain import PlainProduct, plain_product
from .product import Product
from .quantized import Int4Product, ScaledProduct, quantized_product
from .rows import Activations, QuantizedRows, RowFormat
from .slotted import SlottedProduct, SlottedRows
from .weights import QuantizedWeight


class StoredWeight(Protocol):
    """A quantised weight as a checkpoint has it, to be filled and then read once.

    `shape`: (out, in). `dtype`: what the activations have that it is multiplied by.
    """

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def read(self) -> QuantizedWeight:
        """In a layout that the kernels take. What the checkpoint had may be freed afterwards."""


class Linear:
    """x @ weightᵀ + bias. weight: [out, in], or stored quantised; bias: [out] or None.

    A weight that comes unquantised is never rounded to int8 unless `quantizable`. One that `is_plain` is `packed` as it
    lies, dequantised if need be, for whoever multiplies by parts of it.
    """

    def __init__(
        self,
        weight: Tensor | StoredWeight,
        bias: Tensor | None = None,
        quantizable: bool = True,
        is_plain: bool = False,
    ) -> None:
        self._held: Tensor | StoredWeight | None = weight
        self._product: Product | None = PlainProduct(weight, bias) if isinstance(weight, Tensor) else None
        self._quantizable = quantizable
        self._is_plain = is_plain
        self.num_outputs: int = weight.shape[0]
        self.num_inputs: int = weight.shape[1]
        self.bias = bias

    @property
    def held(self) -> Tensor | StoredWeight:
        """To be filled before `prepack`, which gives it up."""
        assert self._held is not None, "the weight is packed"
        return self._held

    @property
    def weight(self) -> Tensor:
        """`held` where it is not quantised."""
        assert isinstance(self.held, Tensor), "the weight is quantised"
        return self.held

    def prepack(self, int8: bool = False) -> None:
        """Bring the weight into the layout that is fastest here, once.

        With `int8` an unquantised weight that is quantizable is rounded to that; `supports_int8` says where it can be.
        """
        held, self._held = self.held, None
        if self._is_plain:
            plain = held if isinstance(held, Tensor) else held.read().dequantized(held.dtype)
            self._product = PlainProduct(plain, self.bias)
        elif not isinstance(held, Tensor):
            self._product = quantized_product(held.read(), self.bias, held.dtype)
        elif int8 and self._quantizable:
            self._product = Int8Product(held, self.bias)
        else:
            self._product = plain_product(held, self.bias)

    @property
    def packed(self) -> Tensor | QuantizedWeight | None:
        """What a GPU's product multiplies by, after `prepack`; None where a product has a layout of its own."""
        return self._product.weight if isinstance(self._product, PlainProduct | ScaledProduct | Int4Product) else None

    def release(self) -> None:
        """Give the product up, for whoever multiplies by its weight in another way."""
        self._product = None

    def scratch_bytes(self, num_rows: int, dtype: torch.dtype) -> int:
        """See `Product.scratch_bytes`."""
        return 0 if self._product is None else self._product.scratch_bytes(num_rows, dtype)

    @property
    def is_adapted(self) -> bool:
        return isinstance(self._product, AdaptedProduct)

    def adapt(self, rows: AdaptedRows, additions: Sequence[Addition]) -> None:
        """Add these to what it gives, in the place of those that it had; to be called after `prepack`."""
        product = self._product.product if isinstance(self._product, AdaptedProduct) else self._product
        assert product is not None, "the weight is still as the checkpoint has it"
        self._product = AdaptedProduct(product, rows, additions) if additions else product

    def adapt_in_slots(self, rows: SlottedRows, matrices: AdapterMatrices) -> None:
        """Add what `matrices` hold to what it gives, on a GPU; to be called once, after `prepack`."""
        assert self._product is not None, "the weight is still as the checkpoint has it"
        self._product = SlottedProduct(self._product, rows, matrices)

    @property
    def row_format(self) -> RowFormat | None:
        """The form of bytes that it takes activations in too, which saves it to make them; None: in none."""
        return self._product.row_format if isinstance(self._product, ScaledProduct) else None

    def __call__(self, x: Activations) -> Tensor:
        """x: [n, in], of the weight's dtype or in the `row_format`. Returns [n, out]."""
        assert self._product is not None, "the weight is still as the checkpoint has it"
        if isinstance(x, QuantizedRows):
            assert isinstance(self._product, ScaledProduct), "it has no row format"
            return self._product.of_rows(x)
        return self._product(x)

    def gated(self, activate: Callable[[Tensor], Tensor], gate_up: Tensor) -> Tensor:
        """What it gives of activate(gate_up), both in one where it can be. gate_up: [n, 2 * in]. Returns [n, out]."""
        assert self._product is not None, "the weight is still as the checkpoint has it"
        return self._product.gated(activate, gate_up)
