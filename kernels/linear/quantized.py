"""Products with quantised weights: in Triton where a GPU takes them, else the way that is fastest on the CPU."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..device import runs_triton, supports_fp8
from .gates import GATES
from .grouped import GroupedProduct, can_take_grouped, supports_grouped
from .int8 import Int8Product, supports_int8
from .plain import plain_product
from .product import Product
from .rows import QuantizedRows, RowFormat
from .unpacked import int4_linear_unpacked, min_unpacked_rows, unpacked_bytes
from .weights import KERNEL_GROUP_SIZE, Fp4Weight, Int4Weight, QuantizedWeight, ScaledWeight


def quantized_product(weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> Product:
    """What is fastest here for activations of `dtype`.

    Where nothing multiplies the quantised weight, it is dequantised once: what the checkpoint says is computed then,
    in the memory of a checkpoint that is not quantised.
    """
    if isinstance(weight, Int4Weight | Fp4Weight):
        if runs_triton(weight.packed):
            return Int4Product(weight, bias)
    elif _takes_scaled(weight):
        return ScaledProduct(weight.with_known_blocks(), bias)
    elif weight.values.dtype == torch.int8 and weight.num_groups == 1 and supports_int8(dtype, weight.values.device):
        return Int8Product(weight.values, bias, scales=weight.scales[0])
    if supports_grouped(dtype, weight.scales.device) and can_take_grouped(weight, dtype):
        return GroupedProduct(weight, bias, dtype)
    return plain_product(weight.dequantized(dtype), bias)


class Int4Product(Product):
    """Dequantised in the kernel (W4A16), or for many rows before the product. See `Product`."""

    def __init__(self, weight: Int4Weight | Fp4Weight, bias: Tensor | None) -> None:
        self.weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        from .triton import int4_linear_triton

        order = self.weight.order if isinstance(self.weight, Int4Weight) else None
        placed = x if order is None else x[:, order]
        is_fused = len(x) < min_unpacked_rows(self.weight, x.dtype)
        multiply = int4_linear_triton if is_fused else int4_linear_unpacked
        return multiply(placed, self.weight, self._bias)

    def scratch_bytes(self, num_rows: int, dtype: torch.dtype) -> int:
        return 0 if num_rows < min_unpacked_rows(self.weight, dtype) else unpacked_bytes(self.weight, dtype)


class ScaledProduct(Product):
    """Activations quantised as they come, each row, or each group in a row, with a scale of its own. See `Product`."""

    def __init__(self, weight: ScaledWeight, bias: Tensor | None) -> None:
        self.weight, self._bias = weight, bias
        self.row_format = RowFormat(weight.values.dtype, weight.group_size)

    def __call__(self, x: Tensor) -> Tensor:
        from .triton import quantize_rows_triton

        values, scales = quantize_rows_triton(x, self.weight.values.dtype, self.weight.group_size)
        return self.of_rows(QuantizedRows(values, scales, x.dtype))

    def of_rows(self, rows: QuantizedRows) -> Tensor:
        """The same of activations that come in its `row_format`."""
        from .triton import scaled_linear_triton

        return scaled_linear_triton(rows.values, rows.scales, self.weight, self._bias, rows.dtype)

    def gated(self, activate: Callable[[Tensor], Tensor], gate_up: Tensor) -> Tensor:
        """What one of `GATES` gives is never written out."""
        from .triton import quantize_gated_triton

        gate = GATES.get(activate)
        if gate is None:
            return super().gated(activate, gate_up)
        values, scales = quantize_gated_triton(gate_up, self.weight.values.dtype, self.weight.group_size, gate)
        return self.of_rows(QuantizedRows(values, scales, gate_up.dtype))


def _takes_scaled(weight: ScaledWeight) -> bool:
    is_grouped = weight.num_groups > 1
    if not runs_triton(weight.values) or (is_grouped and weight.group_size != KERNEL_GROUP_SIZE):
        return False
    return weight.values.dtype == torch.int8 or supports_fp8(weight.values.device)
