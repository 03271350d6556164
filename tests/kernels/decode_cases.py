"""Sequences that decode, step after step."""

from array import array
from collections.abc import Sequence
from itertools import count

import numpy

from headrace.kernels.paged_attention import AttentionMetadata, DecodeSeries, DecodeStep
from headrace.kernels.paged_attention.device_plan import DevicePlan
from headrace.kernels.paged_attention.plan import ITEM_FIELDS, AttentionPlan

from .attention_cases import CPU
from .shared_prefix_cases import Row, build


class Decodes:
    """Rows of one new token each; `next` lets each decode another one."""

    def __init__(self, rows: Sequence[Row], block_size: int) -> None:
        first = build([Row(row.prefix, row.own_tokens) for row in rows], block_size)
        self.block_size = block_size
        self._contexts = list(first.context_lens)
        self._tables = [array("i", table) for table in first.block_tables]
        self._fresh = count(5000)
        self._series = DecodeSeries()
        self._number = 0

    def next(self) -> AttentionMetadata:
        begun = [row for row, context in enumerate(self._contexts) if context % self.block_size == 0]
        blocks = [next(self._fresh) for _ in begun]
        for row, block in zip(begun, blocks, strict=True):
            self._tables[row].append(block)
        columns = [len(self._tables[row]) - 1 for row in begun]
        self._contexts = [context + 1 for context in self._contexts]
        self._number += 1
        step = DecodeStep(
            self._series, self._number, *(numpy.array(each, dtype=numpy.int64) for each in (begun, columns, blocks))
        )
        return AttentionMetadata(
            [1] * len(self._tables), self._contexts, self._tables, self.block_size, CPU, decode_step=step
        )


def held_plan(held: DevicePlan) -> AttentionPlan:
    """What the kernels find in a plan's memory."""

    def read(name: str, number: int) -> numpy.ndarray[tuple[int, ...], numpy.dtype[numpy.int32]]:
        return held.section(name)[:number].numpy().copy()

    num_narrow, num_wide, num_merges = (int(read(name, 1)[0]) for name in ("num_narrow", "num_wide", "num_merges"))
    starts = read("merge_starts", num_merges + 1)
    fields = len(ITEM_FIELDS)
    return AttentionPlan(
        narrow=read("narrow", num_narrow * fields).reshape(-1, fields),
        wide=read("wide", num_wide * fields).reshape(-1, fields),
        query_tokens=held.section("query_tokens").numpy().copy(),
        blocks=held.section("blocks").numpy().copy(),
        tables=numpy.empty(0, dtype=numpy.int32),
        merge_tokens=read("merge_tokens", num_merges),
        merge_starts=starts,
        merge_rows=read("merge_rows", int(starts[-1])),
    )
