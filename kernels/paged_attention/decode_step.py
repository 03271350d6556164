"""Consecutive steps in which the same sequences decode a token each: what attention keeps from one to the next."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy
from numpy.typing import NDArray

if TYPE_CHECKING:
    from .native_layout import NativeLayout


class DecodeSeries:
    """The same sequences' steps, one after the other; holds the compiled kernel's layout of the latest."""

    def __init__(self) -> None:
        self.native: tuple[DecodeStep, NativeLayout] | None = None


@dataclass(frozen=True, eq=False, slots=True)
class DecodeStep:
    """A series' step of this number.

    rows: [m], the sequences whose token begins a block; columns: [m], the how manieth of theirs it is; blocks: [m], it.
    """

    series: DecodeSeries
    number: int
    rows: NDArray[numpy.int64]
    columns: NDArray[numpy.int64]
    blocks: NDArray[numpy.int64]

    def follows(self, other: "DecodeStep | None") -> bool:
        """Whether `other` was the step right before this one."""
        return other is not None and other.series is self.series and other.number + 1 == self.number
