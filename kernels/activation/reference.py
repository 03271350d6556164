"""The obvious torch; also the path that runs where no faster one exists."""

from torch import Tensor
from torch.nn.functional import gelu, silu


def silu_and_mul_reference(gate_up: Tensor) -> Tensor:
    """See `silu_and_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate) * up


def gelu_tanh_and_mul_reference(gate_up: Tensor) -> Tensor:
    """See `gelu_tanh_and_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gelu(gate, approximate="tanh") * up
