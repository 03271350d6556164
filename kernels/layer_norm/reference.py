"""The obvious torch; also the path that runs where no faster one exists."""

from torch import Tensor
from torch.nn.functional import layer_norm


def layer_norm_reference(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """See `layer_norm`."""
    return layer_norm(x, weight.shape, weight, bias, eps)


def add_layer_norm_reference(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """See `add_layer_norm`."""
    return layer_norm_reference(residual.add_(x), weight, bias, eps)
