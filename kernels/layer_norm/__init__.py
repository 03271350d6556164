"""LayerNorm, alone and fused with the addition that stands before it in a decoder layer."""

from torch import Tensor

from ..device import runs_triton
from .reference import add_layer_norm_reference, layer_norm_reference


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Normalisation to mean and variance over the last dimension, in float32 (Ba et al., arXiv 1607.06450).

    x: [..., size]; weight, bias: [size], of x's dtype. Returns x's shape and dtype; changes nothing.
    """
    if runs_triton(x):
        from .triton import layer_norm_triton

        return layer_norm_triton(x, weight, bias, eps)
    return layer_norm_reference(x, weight, bias, eps)


def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Add x to the residual stream, in place, and return the stream normalised as `layer_norm` does.

    x, residual: [num_tokens, size]; weight, bias: [size]. Changes residual alone.
    """
    if runs_triton(x):
        from .triton import add_layer_norm_triton

        return add_layer_norm_triton(x, residual, weight, bias, eps)
    return add_layer_norm_reference(x, residual, weight, bias, eps)


__all__ = ["add_layer_norm", "layer_norm"]
