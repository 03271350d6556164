"""Activations in the form that products of bytes take them in."""

from dataclasses import dataclass

import torch
from torch import Tensor

# The largest number of each kind of bytes.
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


@dataclass(frozen=True)
class RowFormat:
    """int8 or float8_e4m3fn, and how many of a row's numbers share a scale: all of them, where it has fewer."""

    dtype: torch.dtype
    group_size: int


@dataclass(frozen=True)
class QuantizedRows:
    """values: [n, in] of a format's dtype; scales: [n, num_groups] float32. dtype: what they were quantised from."""

    values: Tensor
    scales: Tensor
    dtype: torch.dtype


Activations = Tensor | QuantizedRows
