"""A batch's layout as flat arrays, for the compiled kernel."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy
from numpy.typing import NDArray

Ints = NDArray[numpy.int32]


@dataclass(frozen=True)
class NativeLayout:
    """query_starts: [n + 1], and the end. context_lens: [n]. block_tables: [n, max_blocks].

    order: [n], the sequences with those next to each other that begin with the same blocks. shared_blocks: [n], how
    many blocks each sequence in that order has in common with the one before it; 0 for the first.
    """

    query_starts: Ints
    context_lens: Ints
    block_tables: Ints
    order: Ints
    shared_blocks: Ints

    @cached_property
    def addresses(self) -> tuple[int, ...]:
        """Of the arrays, in the order of the fields: asked for by every layer, and slow to come by in numpy."""
        arrays = (self.query_starts, self.context_lens, self.block_tables, self.order, self.shared_blocks)
        return tuple(array.ctypes.data for array in arrays)

    @classmethod
    def build(
        cls,
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        block_size: int,
    ) -> "NativeLayout":
        contexts = numpy.asarray(context_lens, dtype=numpy.int32)
        counts = -(-contexts // block_size)
        tables = _padded(block_tables, counts)
        order = _sorted_rows(tables)
        return cls(
            query_starts=numpy.cumsum([0, *query_lens], dtype=numpy.int32),
            context_lens=contexts,
            block_tables=tables,
            order=order,
            shared_blocks=_shared_with_previous(tables[order], counts[order]),
        )


def _padded(block_tables: Sequence[Sequence[int]], counts: Ints) -> Ints:
    """The blocks in use, zeros after them."""
    used = chain.from_iterable(table[:count] for table, count in zip(block_tables, counts.tolist(), strict=True))
    tables = numpy.zeros((len(counts), counts.max(initial=1)), dtype=numpy.int32)
    tables[numpy.arange(tables.shape[1]) < counts[:, None]] = numpy.fromiter(used, dtype=numpy.int32)
    return tables


def _sorted_rows(tables: Ints) -> Ints:
    """The rows' indices in the order of their contents."""
    # Bytes with the most significant first compare as the numbers do, and a row of them at once.
    rows = tables.astype(">i4").view(f"V{4 * tables.shape[1]}").ravel()
    return numpy.argsort(rows, kind="stable").astype(numpy.int32)


def _shared_with_previous(tables: Ints, counts: Ints) -> Ints:
    shared = numpy.zeros(len(tables), dtype=numpy.int32)
    differs = tables[1:] != tables[:-1]
    limit = numpy.minimum(counts[1:], counts[:-1])
    shared[1:] = numpy.minimum(numpy.where(differs.any(1), differs.argmax(1), limit), limit)
    return shared
