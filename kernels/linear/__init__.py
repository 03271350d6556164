"""Products with a weight matrix, plain or quantised, in the layout the processor is fastest with."""

from .adapted import AdaptedRows, Addition
from .gates import GATES, Gate
from .grouped import supports_grouped
from .int8 import supports_int8
from .linear import Linear, StoredWeight
from .rows import Activations, QuantizedRows, RowFormat
from .slotted import SlottedRows
from .weights import Fp4Weight, Int4Weight, QuantizedWeight, ScaledWeight

__all__ = [
    "GATES",
    "Activations",
    "AdaptedRows",
    "Addition",
    "Fp4Weight",
    "Gate",
    "Int4Weight",
    "Linear",
    "QuantizedRows",
    "QuantizedWeight",
    "RowFormat",
    "ScaledWeight",
    "SlottedRows",
    "StoredWeight",
    "supports_grouped",
    "supports_int8",
]
