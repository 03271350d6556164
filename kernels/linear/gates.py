"""The gated activations that some products have in them."""

from collections.abc import Callable
from enum import IntEnum

from torch import Tensor

from ..activation import gelu_tanh_and_mul, silu_and_mul


class Gate(IntEnum):
    """As `Gate` in kernels/native/src/activation.h numbers them."""

    NONE = 0
    SILU = 1
    GELU_TANH = 2


GATES: dict[Callable[[Tensor], Tensor], Gate] = {silu_and_mul: Gate.SILU, gelu_tanh_and_mul: Gate.GELU_TANH}
