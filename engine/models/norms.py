"""The two kinds of norm that stand before a model's head, each with its weights."""

from collections.abc import Iterator

from torch import Tensor

from ...kernels.layer_norm import add_layer_norm, layer_norm
from ...kernels.norm_rotary import rms_norm
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

    def weight_slots(self, name: str) -> Iterator[WeightSlot]:
        yield WeightSlot(f"{name}.weight", self._weight, self._config.norm_offset)


class LayerNorm:
    """The same with a mean taken off and a bias added."""

    def __init__(self, blank: BlankWeights) -> None:
        self._eps = blank.config.rms_norm_eps
        self._weight, self._bias = blank.norm(blank.config.hidden_size), blank.norm(blank.config.hidden_size)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [..., hidden_size]. Returns the same shape; changes nothing."""
        return layer_norm(x, self._weight, self._bias, self._eps)

    def of_sum(self, x: Tensor, residual: Tensor) -> Tensor:
        """The norm of the residual stream once x has been added to it, in place. Both: [num_tokens, hidden_size]."""
        return add_layer_norm(x, residual, self._weight, self._bias, self._eps)

    def weight_slots(self, name: str) -> Iterator[WeightSlot]:
        yield WeightSlot(f"{name}.weight", self._weight)
        yield WeightSlot(f"{name}.bias", self._bias)
