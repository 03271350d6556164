"""LayerNorm on the GPU: checks, and launches."""

from torch import Tensor

from ..triton_checks import check_launch
from ..triton_norms import launch_norm
from .triton_kernels import layer_norm_kernel


def layer_norm_triton(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """See `layer_norm`."""
    check_launch("x", x, layer_norm_kernel)
    rows = x.reshape(-1, x.shape[-1])
    return _normalise(rows, None, weight, bias, eps).view(x.shape)


def add_layer_norm_triton(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """See `add_layer_norm`."""
    check_launch("x", x, layer_norm_kernel)
    return _normalise(x, residual, weight, bias, eps)


def _normalise(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return launch_norm(layer_norm_kernel, x, residual, {"weight": weight, "bias": bias}, (x.dtype,), eps)
