"""What the GPU's attention kernel is to do in one step, worked out on the host.

Everything that attention does is one kind of work item: some queries over a range of some block table's keys. A
decode, a chunk of a prefill, a segment of a long context and many sequences' queries over their shared prefix differ
in their numbers only. Queries with several items have their parts merged by log-sum-exp afterwards (Hydragen, arXiv
2402.05099; the item list read by a persistent grid: "The Anatomy of a Triton Attention Kernel", arXiv 2511.11581).
"""

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy

from .batch_layout import BatchLayout, Ints
from .prefix_levels import SharedSpan

# An item's numbers, in this order; the kernel reads them by position.
ITEM_FIELDS = (
    "first_query",  # its first query's place in `query_tokens`
    "num_queries",
    "table",  # what to add to a key's block number to find the block in `blocks`
    "kv_begin",  # its keys' positions
    "kv_end",
    "first_position",  # of its first query; each further one stands one later, and sees the keys up to itself
    "is_final",  # 1: the result is the output; 0: it is a part, to be merged
    "first_partial",  # the part's first row in the workspace
)
_FIELD = {name: index for index, name in enumerate(ITEM_FIELDS)}


@dataclass(frozen=True)
class Tiling:
    """How the kernel cuts its work.

    narrow_queries, wide_queries: queries in a Q-block of its two shapes. tile: segments are of a multiple of so many
    keys. narrow_programs, wide_programs: how many work units, one an item and KV head, the device runs at once.
    """

    narrow_queries: int
    wide_queries: int
    tile: int
    num_kv_heads: int
    narrow_programs: int
    wide_programs: int

    @property
    def max_narrow_cuts(self) -> int:
        """How many narrow items a plan may have beyond one for each up to `narrow_queries` of a run's queries."""
        return _max_cuts(self.narrow_programs / self.num_kv_heads, _MIN_NARROW_SEGMENT)

    @property
    def max_wide_cuts(self) -> int:
        """The same of wide ones."""
        return _max_cuts(self.wide_programs / self.num_kv_heads, _MIN_WIDE_SEGMENT)


@dataclass(frozen=True)
class AttentionPlan:
    """narrow, wide: [n, len(ITEM_FIELDS)], longest first, so that a step does not end on a long one.

    query_tokens: which of the batch's tokens the items' queries are, its own tokens in their order first. blocks: all
    block tables, one after the other. tables: [n], each sequence's own `table`.
    merge_tokens: [m] tokens with several parts; those of the i-th are the workspace's rows
    `merge_rows[merge_starts[i] : merge_starts[i + 1]]`.
    """

    narrow: Ints
    wide: Ints
    query_tokens: Ints
    blocks: Ints
    tables: Ints
    merge_tokens: Ints
    merge_starts: Ints
    merge_rows: Ints

    @classmethod
    def build(
        cls,
        layout: BatchLayout,
        tiling: Tiling,
        spans: Sequence[SharedSpan] = (),
        sliding_window: int | None = None,
        room: int = 0,
    ) -> "AttentionPlan":
        """`spans`: what is computed once for several sequences; to be empty under a sliding window. `room`: blocks by
        which each sequence's table may grow while the plan goes on.
        """
        assert not (spans and sliding_window), "under a window queries see different parts of a shared prefix"
        runs = _Runs.of(layout, spans, room)
        is_narrow = runs.items[:, _FIELD["num_queries"]] <= tiling.narrow_queries
        narrow_share, wide_share = (
            programs / tiling.num_kv_heads for programs in (tiling.narrow_programs, tiling.wide_programs)
        )
        narrow_cut = _Cut(tiling.narrow_queries, tiling.tile, narrow_share, _MIN_NARROW_SEGMENT)
        wide_cut = _Cut(tiling.wide_queries, tiling.tile, wide_share, _MIN_WIDE_SEGMENT, _WIDE_START)
        narrow = narrow_cut.items(runs.items[is_narrow], sliding_window)
        wide = wide_cut.items(runs.items[~is_narrow], sliding_window)
        num_partial = _number_partials(narrow, 0)
        _number_partials(wide, num_partial)
        tables = runs.items[: len(layout.query_lens), _FIELD["table"]]
        return cls(narrow, wide, runs.query_tokens, runs.blocks, tables, *_merges(narrow, wide, runs.query_tokens))

    @property
    def growth(self) -> Ints:
        """What to add to `narrow` when each sequence, of one query, goes on by a token: [len(narrow), fields].

        Segments stay as they are, but for the last ones, which get the token. A window's beginnings stay too: it is for
        the kernel to see how far each query looks back.
        """
        growth = numpy.zeros_like(self.narrow)
        position, end = self.narrow[:, _FIELD["first_position"]], self.narrow[:, _FIELD["kv_end"]]
        is_own = self.narrow[:, _FIELD["first_query"]] < len(self.tables)
        growth[:, _FIELD["first_position"]] = is_own
        growth[:, _FIELD["kv_end"]] = is_own & (end == position + 1)
        return growth


@dataclass(frozen=True)
class _Runs:
    """items: [n, len(ITEM_FIELDS)], consecutive entries of `query_tokens` over one range of keys, before they are cut.

    First a sequence's own each, over the keys that no span holds, then one a span. A run that sees all that its queries
    see is final.
    """

    items: Ints
    query_tokens: Ints
    blocks: Ints

    @classmethod
    def of(cls, layout: BatchLayout, spans: Sequence[SharedSpan], room: int) -> "_Runs":
        size, query_lens, contexts = layout.block_size, layout.queries, layout.contexts
        num_own, ends = len(query_lens), -(-contexts // size)
        starts = _starts(query_lens)
        members = [_ints(span.members) for span in spans]
        covered = numpy.zeros_like(contexts)
        for span, of_span in zip(spans, members, strict=True):
            covered[of_span] = span.end
        shared = [_joined_ranges(starts[of_span], query_lens[of_span]) for of_span in members]
        query_tokens = numpy.concatenate((numpy.arange(query_lens.sum(), dtype=numpy.int32), *shared))

        items = numpy.zeros((num_own + len(spans), len(ITEM_FIELDS)), dtype=numpy.int32)
        lens = items[:, _FIELD["num_queries"]]
        lens[:num_own], lens[num_own:] = query_lens, [len(tokens) for tokens in shared]
        items[:, _FIELD["first_query"]] = _starts(lens)
        begin, end = items[:, _FIELD["kv_begin"]], items[:, _FIELD["kv_end"]]
        begin[:num_own], begin[num_own:] = covered, [span.begin for span in spans]
        end[:num_own], end[num_own:] = ends + room, [span.end for span in spans]
        items[:, _FIELD["table"]] = _starts(end - begin) - begin
        begin *= size
        end *= size
        end[:num_own] = contexts
        # A span's queries all stand after it, and so see it whole.
        position = items[:, _FIELD["first_position"]]
        position[:num_own], position[num_own:] = contexts - query_lens, end[num_own:]
        items[:num_own, _FIELD["is_final"]] = covered == 0
        blocks = _joined_tables(layout.tables, covered.tolist(), ends.tolist(), spans, room)
        return cls(items, query_tokens, blocks)


# Two units a program even out what differs between them; segments below these lengths cost more to merge than they
# gain. Of two sequences of 256 tokens an H200 attends to their own keys in 17 microseconds, a unit each, and in 14 to
# the first halves as one, the second ones for themselves, and merging.
_UNITS_PER_PROGRAM = 2
_MIN_NARROW_SEGMENT, _MIN_WIDE_SEGMENT = 128, 256
# How many keys a wide unit could see in the time in which it waits for its first tile and writes its part: about three
# tiles by counting what waits for what, not measured. A processor has one such unit, and nothing else hides it; of
# narrow ones it has several, and what one waits another reads.
_WIDE_START = 192


def _max_cuts(concurrency: float, shortest: int) -> int:
    """All ranges together are of so many segments, and one more for each range, at most.

    A segment has at least `shortest` keys, and at least an equal share of them all, rounded down.
    """
    return math.ceil(concurrency * _UNITS_PER_PROGRAM * (shortest + 1) / shortest)


@dataclass(frozen=True)
class _Cut:
    """Runs into items of at most `max_queries`, in segments so short that `concurrency` items at once share evenly.

    `shortest`: keys that a segment has at least. `start`: keys' worth of time that an item takes beside its keys.
    """

    max_queries: int
    tile: int
    concurrency: float
    shortest: int
    start: int = 0

    def items(self, runs: Ints, sliding_window: int | None) -> Ints:
        # As where all decode: mostly nothing is wide then.
        if not len(runs):
            return runs
        run, nth = _expand(-(-runs[:, _FIELD["num_queries"]] // self.max_queries))
        items = runs[run]
        num_queries, position, begin, end = (
            items[:, _FIELD[name]] for name in ("num_queries", "first_position", "kv_begin", "kv_end")
        )
        offset = nth * self.max_queries
        items[:, _FIELD["first_query"]] += offset
        position += offset
        numpy.minimum(self.max_queries, num_queries - offset, out=num_queries)
        if sliding_window is not None:
            numpy.maximum(begin, position - sliding_window + 1, out=begin)
        numpy.minimum(end, position + num_queries, out=end)
        items = self._segments(items)
        length = items[:, _FIELD["kv_end"]] - items[:, _FIELD["kv_begin"]]
        return items[numpy.argsort(-length, kind="stable")]

    def _segments(self, items: Ints) -> Ints:
        """The items cut into ranges of keys that are short enough."""
        end = items[:, _FIELD["kv_end"]]
        length = end - items[:, _FIELD["kv_begin"]]
        share = float(length.sum()) / self.concurrency
        longest = max(self.shortest, _round_up(int(share / _UNITS_PER_PROGRAM), self.tile))
        if length.max() <= longest:
            return items
        size, count = self._even(length, numpy.maximum(1, -(-length // longest)))
        if self.start:
            # As many segments as run at once, and no more.
            once = numpy.minimum(numpy.maximum(1, length // share), -(-length // self.shortest)).astype(numpy.int32)
            size_at_once, count_at_once = self._even(length, once)
            is_one_round = count_at_once.sum() <= self.concurrency
            # Even if the shorter ones came out all even, they would take longer by the second's start.
            if is_one_round and size_at_once.max() + self.start <= share + _UNITS_PER_PROGRAM * self.start:
                size, count = size_at_once, count_at_once
        owner, nth = _expand(count)
        segments = items[owner]
        segments[:, _FIELD["kv_begin"]] += nth * size[owner]
        segments[:, _FIELD["kv_end"]] = numpy.minimum(end[owner], segments[:, _FIELD["kv_begin"]] + size[owner])
        segments[:, _FIELD["is_final"]] &= count[owner] == 1
        return segments

    def _even(self, length: Ints, wanted: Ints) -> tuple[Ints, Ints]:
        """The size of `wanted` segments of each length, equally long up to whole tiles, and how many that needs."""
        size = numpy.maximum(self.tile, -(-length // (wanted * self.tile)) * self.tile)
        return size, numpy.maximum(1, -(-length // size))


def _number_partials(items: Ints, first: int) -> int:
    """Give each part its rows of the workspace, from `first` on; returns the first row that is left."""
    rows = numpy.where(items[:, _FIELD["is_final"]] == 1, 0, items[:, _FIELD["num_queries"]])
    items[:, _FIELD["first_partial"]] = first + _starts(rows)
    return first + int(rows.sum())


def _merges(narrow: Ints, wide: Ints, query_tokens: Ints) -> tuple[Ints, Ints, Ints]:
    """`merge_tokens`, `merge_starts` and `merge_rows` of the parts."""
    items = numpy.concatenate((narrow, wide))
    parts = items[items[:, _FIELD["is_final"]] == 0]
    num_queries = parts[:, _FIELD["num_queries"]]
    rows = _joined_ranges(parts[:, _FIELD["first_partial"]], num_queries)
    tokens = query_tokens[_joined_ranges(parts[:, _FIELD["first_query"]], num_queries)]
    order = numpy.argsort(tokens, kind="stable")
    in_order = tokens[order]
    starts = numpy.flatnonzero(numpy.diff(in_order, prepend=numpy.int32(-1)))
    merge_starts = numpy.append(starts, len(tokens)).astype(numpy.int32)
    return in_order[starts], merge_starts, rows[order]


def _joined_tables(
    tables: "list[array[int]]", begins: list[int], ends: list[int], spans: Sequence[SharedSpan], room: int
) -> Ints:
    """Each sequence's blocks from its begin to its end, with room after them, then each span's."""
    own = [table[begin:end] for table, begin, end in zip(tables, begins, ends, strict=True)]
    shared = [tables[span.members[0]][span.begin : span.end] for span in spans]
    between = bytes(room * numpy.int32().itemsize)
    return numpy.frombuffer(between.join((*own, b"".join(shared))), dtype=numpy.int32)


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _ints(values: Sequence[int]) -> Ints:
    return numpy.asarray(values, dtype=numpy.int32)


def _starts(lengths: Ints) -> Ints:
    """Where each of some ranges begins when they are put one after the other."""
    return numpy.cumsum(lengths, dtype=numpy.int32) - lengths


def _expand(counts: Ints) -> tuple[Ints, Ints]:
    """For `counts[i]` entries of each i: which i each entry is of, and its number among them."""
    owner = numpy.repeat(numpy.arange(len(counts), dtype=numpy.int32), counts)
    return owner, numpy.arange(len(owner), dtype=numpy.int32) - _starts(counts)[owner]


def _joined_ranges(starts: Ints, lengths: Ints) -> Ints:
    """The numbers of the ranges, one range after the other."""
    owner, nth = _expand(lengths)
    return starts[owner] + nth
