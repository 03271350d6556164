"""Products with a weight matrix, plain or quantised, in the layout the processor is fastest with."""

from .adapted import AdaptedRows, Addition
from .grouped import supports_grouped
from .int8 import supports_int8
from .linear import Linear, StoredWeight
from .slotted import SlottedRows
from .weights import Fp4Weight, Int4Weight, QuantizedWeight, ScaledWeight

__all__ = [
    "AdaptedRows",
    "Addition",
    "Fp4Weight",
    "Int4Weight",
    "Linear",
    "QuantizedWeight",
    "ScaledWeight",
    "SlottedRows",
    "StoredWeight",
    "supports_grouped",
    "supports_int8",
]
