"""Products with a weight in the activations' own dtype: torch's, oneDNN's with its layout, or the compiled kernel's."""

import torch
from torch import Tensor
from torch.nn.functional import linear

from .float32 import Float32Product, takes_float32
from .native import MAX_ROWS, linear_native, takes_weight
from .packed import PackedProduct, takes_packed
from .product import Product

# The number of rows oneDNN chooses its layout for; what it chooses for one row or 64 measured alike.
_TYPICAL_ROWS = 64


def plain_product(weight: Tensor, bias: Tensor | None) -> Product:
    """What is fastest here for this weight.

    On a CPU that is one of the compiled kernels. In bfloat16 with AMX it reads the weight as it is: with few rows it is
    the fastest, and with thousands the plain product is as fast as oneDNN's packed one. With AVX-512 alone, and in
    float32, it has a layout of its own; oneDNN's is for where there is no such kernel.
    """
    if takes_weight(weight):
        return NativeProduct(weight, bias)
    if takes_packed(weight):
        return PackedProduct(weight, bias)
    if takes_float32(weight):
        return Float32Product(weight, bias)
    if weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and _has_onednn():
        return OneDnnProduct(weight, bias)
    return PlainProduct(weight, bias)


class PlainProduct(Product):
    """torch's own. See `Product`."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self._bias)


class NativeProduct(PlainProduct):
    """The compiled kernel's for few rows, torch's for many. See `Product`."""

    def __call__(self, x: Tensor) -> Tensor:
        if len(x) <= MAX_ROWS and x.stride(-1) == 1:
            return linear_native(x, self.weight, self._bias)
        return super().__call__(x)


class OneDnnProduct(Product):
    """With the weight in oneDNN's own layout. See `Product`."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._num_outputs = len(weight)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _TYPICAL_ROWS)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        # oneDNN takes no empty batch: a step that samples nothing has one.
        if not len(x):
            return x.new_empty(0, self._num_outputs)
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return product


def _has_onednn() -> bool:
    """Whether it lays out bfloat16 here: without AVX-512 or what came after it, oneDNN refuses to."""
    has_layouts = torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return has_layouts and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
