"""A linear layer's weights and its product, plain or in oneDNN's own layout."""

import torch
from torch import Tensor
from torch.nn.functional import linear

# The number of rows oneDNN chooses its layout for; what it chooses for one row or 64 measured alike.
_TYPICAL_ROWS = 64


class Linear:
    """x @ weightᵀ + bias. weight: [out, in]; bias: [out] or None."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight: Tensor | None = weight
        self._packed: Tensor | None = None
        self._num_outputs = weight.shape[0]
        self.bias = bias

    @property
    def weight(self) -> Tensor:
        """To be filled before `prepack`, which gives it up."""
        assert self._weight is not None, "the weight is packed"
        return self._weight

    def prepack(self) -> None:
        """Bring the weight into the layout that is fastest here, once: oneDNN's for bfloat16 on a CPU.

        In float32 the layouts measured alike (`docs/decisions.md`), and it stays as it is.
        """
        weight = self.weight
        if weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and _has_onednn():
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _TYPICAL_ROWS)
            self._weight = None

    def __call__(self, x: Tensor) -> Tensor:
        """x: [n, in], of the weight's dtype. Returns [n, out]."""
        if self._packed is None:
            return linear(x, self.weight, self.bias)
        # oneDNN takes no empty batch: a step that samples nothing has one.
        if not len(x):
            return x.new_empty(0, self._num_outputs)
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return product


def _has_onednn() -> bool:
    return torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_linear_pointwise")
