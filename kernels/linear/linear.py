"""A linear layer's weights and its product: plain, in oneDNN's own layout, or in int8."""

import torch
from torch import Tensor
from torch.nn.functional import linear

from .int8 import Int8Product
from .native import MAX_ROWS, linear_native, takes_weight

# The number of rows oneDNN chooses its layout for; what it chooses for one row or 64 measured alike.
_TYPICAL_ROWS = 64


class Linear:
    """x @ weightᵀ + bias. weight: [out, in]; bias: [out] or None. Never in int8 unless `quantizable`."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, quantizable: bool = True) -> None:
        self._weight: Tensor | None = weight
        self._packed: Tensor | None = None
        self._int8: Int8Product | None = None
        self._quantizable = quantizable
        self._is_native = False
        self._num_outputs = weight.shape[0]
        self.bias = bias

    @property
    def weight(self) -> Tensor:
        """To be filled before `prepack`, which gives it up."""
        assert self._weight is not None, "the weight is packed"
        return self._weight

    def prepack(self, int8: bool = False) -> None:
        """Bring the weight into the layout that is fastest here, once.

        In bfloat16 on a CPU that is oneDNN's, or none where the compiled kernel reads the weight as it is: with few
        rows that kernel is the faster, and with thousands the plain product is as fast as oneDNN's packed one.
        In float32 the layouts measured alike (`docs/decisions.md`), and it stays as it is. With `int8` a quantizable
        weight is rounded to that; `supports_int8` says where it can be.
        """
        weight = self.weight
        if int8 and self._quantizable:
            self._int8 = Int8Product(weight, self.bias)
            self._weight = None
        elif takes_weight(weight):
            self._is_native = True
        elif weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and _has_onednn():
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _TYPICAL_ROWS)
            self._weight = None

    def __call__(self, x: Tensor) -> Tensor:
        """x: [n, in], of the weight's dtype. Returns [n, out]."""
        if self._int8 is not None:
            return self._int8(x)
        if self._is_native and len(x) <= MAX_ROWS and x.stride(-1) == 1:
            return linear_native(x, self.weight, self.bias)
        if self._packed is None:
            return linear(x, self.weight, self.bias)
        # oneDNN takes no empty batch: a step that samples nothing has one.
        if not len(x):
            return x.new_empty(0, self._num_outputs)
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return product


def _has_onednn() -> bool:
    return torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_linear_pointwise")
