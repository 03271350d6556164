"""A batch's layout as flat arrays, for the compiled kernel."""

from array import array
from dataclasses import dataclass, replace
from functools import cached_property

import numpy

from .batch_layout import BatchLayout, Ints
from .decode_step import DecodeStep

# Blocks by which sequences that decode may grow before their tables are copied to wider ones.
_ROOM = 16


@dataclass(frozen=True)
class NativeLayout:
    """query_starts: [n + 1], and the end. context_lens: [n]. block_tables: [n, max_blocks], zeros after what is in use.

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
        return tuple(each.ctypes.data for each in arrays)

    @classmethod
    def build(cls, batch: BatchLayout, room: int = 0) -> "NativeLayout":
        """`room`: how much wider the block tables are than the batch needs."""
        counts = -(-batch.contexts // batch.block_size)
        tables = _padded(batch.tables, counts, room)
        order = _sorted_rows(tables)
        return cls(
            query_starts=numpy.cumsum([0, *batch.query_lens], dtype=numpy.int32),
            context_lens=batch.contexts,
            block_tables=tables,
            order=order,
            shared_blocks=shared_with_previous(tables[order], counts[order]),
        )

    def next(self, batch: BatchLayout, step: DecodeStep) -> "NativeLayout":
        """The layout of the step after this one's. A block that begins is nobody else's: what is shared stays."""
        tables = self.block_tables
        if len(step.rows):
            if step.columns.max() >= tables.shape[1]:
                tables = numpy.pad(tables, ((0, 0), (0, _ROOM)))
            # Whoever has the layout before this one does not look there.
            tables[step.rows, step.columns] = step.blocks
        return replace(self, context_lens=batch.contexts, block_tables=tables)


def native_layout_of(batch: BatchLayout, step: DecodeStep | None) -> NativeLayout:
    """A batch's layout, made from that of the step before where there is one."""
    if step is None:
        return NativeLayout.build(batch)
    last_step, last = step.series.native or (None, None)
    if last is not None and step.follows(last_step):
        layout = last.next(batch, step)
    else:
        layout = NativeLayout.build(batch, _ROOM)
    step.series.native = step, layout
    return layout


def _padded(block_tables: "list[array[int]]", counts: Ints, room: int) -> Ints:
    """The blocks in use, zeros after them."""
    width = int(counts.max(initial=1)) + room
    blocks, zeros = array("i"), array("i", [0] * width)
    for table, count in zip(block_tables, counts.tolist(), strict=True):
        blocks.extend(table[:count])
        blocks.extend(zeros[count:])
    return numpy.frombuffer(blocks, dtype=numpy.int32).reshape(len(counts), width)


def _sorted_rows(tables: Ints) -> Ints:
    """The rows' indices in the order of their contents."""
    # Bytes with the most significant first compare as the numbers do, and a row of them at once.
    rows = tables.astype(">i4").view(f"V{4 * tables.shape[1]}").ravel()
    return numpy.argsort(rows, kind="stable").astype(numpy.int32)


def shared_with_previous(tables: Ints, counts: Ints) -> Ints:
    shared = numpy.zeros(len(tables), dtype=numpy.int32)
    differs = tables[1:] != tables[:-1]
    limit = numpy.minimum(counts[1:], counts[:-1])
    shared[1:] = numpy.minimum(numpy.where(differs.any(1), differs.argmax(1), limit), limit)
    return shared
