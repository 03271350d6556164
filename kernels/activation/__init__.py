"""The activations of a decoder's MLP: gated, and GELU alone."""

import torch
from torch import Tensor
from torch.nn import functional

from ..device import runs_triton
from ..native import runs_native
from .native import gelu_tanh_and_mul_native, silu_and_mul_native
from .reference import gelu_tanh_and_mul_reference, silu_and_mul_reference


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up. gate_up: [num_tokens, 2 * size], gate first. Returns [num_tokens, size]; changes nothing."""
    if runs_triton(gate_up):
        from .triton import silu_and_mul_triton

        return silu_and_mul_triton(gate_up)
    return silu_and_mul_native(gate_up) if runs_native(gate_up) else silu_and_mul_reference(gate_up)


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up, gelu in its approximation by tanh (Hendrycks & Gimpel, arXiv 1606.08415).

    Shapes as in `silu_and_mul`; changes nothing.
    """
    if runs_triton(gate_up):
        from .triton import gelu_tanh_and_mul_triton

        return gelu_tanh_and_mul_triton(gate_up)
    return gelu_tanh_and_mul_native(gate_up) if runs_native(gate_up) else gelu_tanh_and_mul_reference(gate_up)


def clamped_swiglu(gate_up: Tensor, limit: float, alpha: float) -> Tensor:
    """(up + 1) · gate · sigmoid(alpha · gate), of gates of at most `limit` and ups of at most that size (gpt-oss).

    gate_up: [num_tokens, 2 * size], a gate and its up in turns. Returns [num_tokens, size]; changes nothing.
    """
    if runs_triton(gate_up):
        from .triton import clamped_swiglu_triton

        return clamped_swiglu_triton(gate_up, limit, alpha)
    gate, up = gate_up[..., ::2].clamp(max=limit), gate_up[..., 1::2].clamp(-limit, limit)
    return up.add_(1).mul_(torch.sigmoid(alpha * gate).mul_(gate))


def gelu(x: Tensor) -> Tensor:
    """x · Φ(x), exactly. One kernel of torch's on every device: nothing stands beside it to be fused with.

    x: any shape; changes nothing.
    """
    return functional.gelu(x)


def gelu_tanh(x: Tensor) -> Tensor:
    """The same in its approximation by tanh."""
    return functional.gelu(x, approximate="tanh")


def relu_squared(x: Tensor) -> Tensor:
    """max(x, 0)² (So et al., arXiv 2109.08668). x: any shape; changes nothing."""
    return functional.relu(x).square_()


def xielu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: Tensor, eps: Tensor) -> Tensor:
    """An integral of ELU with learnt slopes (Huang & Schlag, arXiv 2411.13010), in float32 and rounded once.

    x: any shape; the others: one number each. Changes nothing.
    """
    wide, beta = x.float(), beta.float()
    above = functional.softplus(alpha_p.float()) * wide.square()
    slope = beta + functional.softplus(alpha_n.float())
    below = (torch.expm1(torch.minimum(wide, eps.float())) - wide) * slope
    return (torch.where(wide > 0, above, below) + beta * wide).to(x.dtype)


__all__ = ["clamped_swiglu", "gelu", "gelu_tanh", "gelu_tanh_and_mul", "relu_squared", "silu_and_mul", "xielu"]
