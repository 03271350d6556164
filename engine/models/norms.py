"""The two kinds of norm that layers have, and a model's head, each with its weights."""

from collections.abc import Iterator

import torch
from torch import Tensor

from ...kernels.layer_norm import add_layer_norm, layer_norm
from ...kernels.linear import Activations, RowFormat
from ...kernels.norm_rotary import add_rms_norm, add_rms_norm_quantized, rms_norm
from ..checkpoints.weights import WeightSlot
from .blocks import BlankWeights


class RmsNorm:
    """Over a model's hidden size, with the offset that its config gives the weights."""

    def __init__(self, blank: BlankWeights) -> None:
        self._config = blank.config
        self._weight = blank.norm(blank.config.hidden_size)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [..., hidden_size]. Returns the same shape; changes nothing."""
        return rms_norm(x, self._weight, self._config.rms_norm_eps)

    def of_sum(self, x: Tensor, residual: Tensor) -> Tensor:
        """The norm of the residual stream once x has been added to it, in place. Both: [num_tokens, hidden_size]."""
        return add_rms_norm(x, residual, self._weight, self._config.rms_norm_eps)

    def of_sum_in(self, row_format: RowFormat | None, x: Tensor, residual: Tensor) -> Activations:
        """As `of_sum`, in the form in which a product takes it, if it has one; see `Linear.row_format`."""
        if row_format is None:
            return self.of_sum(x, residual)
        return add_rms_norm_quantized(x, residual, self._weight, self._config.rms_norm_eps, row_format)

    def weight_slots(self, name: str) -> Iterator[WeightSlot]:
        yield WeightSlot(f"{name}.weight", self._weight, self._config.norm_offset)


class LayerNorm:
    """The same with a mean taken off and, where the family has one, a bias added."""

    def __init__(self, blank: BlankWeights) -> None:
        self._config, self._eps = blank.config, blank.config.rms_norm_eps
        # What is added to the weights is rounded with them, as the families do it.
        self._weight = torch.empty(blank.config.hidden_size, dtype=blank.dtype, device=blank.device)
        self._bias = torch.zeros_like(self._weight)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [..., hidden_size]. Returns the same shape; changes nothing."""
        return layer_norm(x, self._weight, self._bias, self._eps)

    def of_sum(self, x: Tensor, residual: Tensor) -> Tensor:
        """The norm of the residual stream once x has been added to it, in place. Both: [num_tokens, hidden_size]."""
        return add_layer_norm(x, residual, self._weight, self._bias, self._eps)

    def of_sum_in(self, row_format: RowFormat | None, x: Tensor, residual: Tensor) -> Activations:
        """As `of_sum`: no kernel gives it in another form."""
        return self.of_sum(x, residual)

    def weight_slots(self, name: str) -> Iterator[WeightSlot]:
        yield WeightSlot(f"{name}.weight", self._weight, self._config.norm_offset)
        if self._config.norm_bias:
            yield WeightSlot(f"{name}.bias", self._bias)


def new_norm(blank: BlankWeights) -> RmsNorm | LayerNorm:
    """Of the model's kind, over its hidden size."""
    return LayerNorm(blank) if blank.config.norm == "layer" else RmsNorm(blank)
