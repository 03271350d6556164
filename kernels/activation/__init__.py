"""The gated activations of a decoder's MLP."""

from torch import Tensor

from .reference import silu_and_mul_reference


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up. gate_up: [num_tokens, 2 * size], gate first. Returns [num_tokens, size]; changes nothing."""
    return silu_and_mul_reference(gate_up)


__all__ = ["silu_and_mul"]
