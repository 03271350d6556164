"""Which rows of a data set are made again: some of those that have an answer, drawn by a seed."""

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ...storage.output.part_groups import PartGroups
from ..errors import NotVerifiable

Numbers = npt.NDArray[np.uint64]
# SplitMix64's: http://prng.di.unimi.it/splitmix64.c
_STEPS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


@dataclass(frozen=True)
class Sample:
    """Rows of a data set, with all their columns, in the input's order; and how many of each kind there are in all."""

    table: pa.Table
    num_generated: int
    num_from_cache: int
    num_errors: int

    @property
    def num_rows(self) -> int:
        """How many the data set has, those without an answer too."""
        return self.num_generated + self.num_from_cache + self.num_errors

    @classmethod
    def draw(cls, parts: PartGroups, count: int | float, seed: int) -> Self:
        """So many rows of those with an answer, or this share of them as a float; all when there are fewer.

        The same rows for the same data set and seed, however it is cut into parts. Memory does not grow with it but
        for a share's rows. Raises `NotVerifiable` when no row has an answer.
        """
        has_answer = pc.field("error").is_null()
        num_rows = num_answered = num_from_cache = 0
        for table in parts.tables(["row", "error", "from_cache"]):
            answered = table.filter(has_answer)
            num_rows += len(table)
            num_answered += len(answered)
            if "from_cache" in answered.column_names:
                num_from_cache += pc.sum(answered["from_cache"]).as_py() or 0
        if not num_answered:
            raise NotVerifiable(f"none of the {num_rows} rows has an answer: there is nothing to compare")
        size = math.ceil(count * num_answered) if isinstance(count, float) else min(count, num_answered)
        numbers = (table["row"].to_numpy() for table in parts.tables(["row"], has_answer))
        chosen = pa.array(_chosen(numbers, size, seed), pa.int64())
        table = pa.concat_tables(parts.tables(filter=pc.is_in(pc.field("row"), chosen))).sort_by("row")
        return cls(table, num_answered - num_from_cache, num_from_cache, num_rows - num_answered)


def _chosen(batches: Iterable[npt.NDArray[np.int64]], size: int, seed: int) -> list[int]:
    """The rows with the lowest of the numbers that the seed gives them."""
    rows, draws = np.empty(0, np.int64), np.empty(0, np.uint64)
    for batch in batches:
        rows, draws = np.concatenate((rows, batch)), np.concatenate((draws, _draws(batch, seed)))
        if len(rows) > size:
            lowest = np.argpartition(draws, size - 1)[:size]
            rows, draws = rows[lowest], draws[lowest]
    return [int(row) for row in rows]


def _draws(rows: npt.NDArray[np.int64], seed: int) -> Numbers:
    """A number for each row, in which neither the row nor the seed can be seen."""
    key = int.from_bytes(hashlib.blake2b(str(seed).encode(), digest_size=8).digest())
    mixed = rows.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    for shift, factor in _STEPS:
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))
