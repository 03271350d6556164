"""Products with a weight matrix, in the layout the processor is fastest with."""

from .linear import Linear

__all__ = ["Linear"]
