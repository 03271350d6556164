"""Products with a weight matrix, in the layout the processor is fastest with."""

from .int8 import supports_int8
from .linear import Linear

__all__ = ["Linear", "supports_int8"]
