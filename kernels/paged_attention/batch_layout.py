"""Where a batch's queries, keys and values are."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy
from numpy.typing import NDArray

Ints = NDArray[numpy.int32]


@dataclass(frozen=True)
class BatchLayout:
    """query_lens: new tokens of each sequence. context_lens: all its tokens so far, the new ones included.
    block_tables: its KV blocks, in order, enough for `context_lens`. All lists have one entry a sequence.
    """

    query_lens: Sequence[int]
    context_lens: Sequence[int]
    block_tables: Sequence[Sequence[int]]
    block_size: int

    @cached_property
    def queries(self) -> Ints:
        """`query_lens` as an array."""
        return numpy.array(self.query_lens, dtype=numpy.int32)

    @cached_property
    def contexts(self) -> Ints:
        """`context_lens` as an array."""
        return numpy.array(self.context_lens, dtype=numpy.int32)

    @cached_property
    def tables(self) -> "list[array[int]]":
        """`block_tables` as arrays of 32 bits, which they best are from the beginning."""
        return [table if isinstance(table, array) else array("i", table) for table in self.block_tables]

    @cached_property
    def num_tokens(self) -> int:
        return sum(self.query_lens)

    @cached_property
    def query_starts(self) -> list[int]:
        """Index of each sequence's first query among the batch's tokens."""
        starts, total = [], 0
        for length in self.query_lens:
            starts.append(total)
            total += length
        return starts
