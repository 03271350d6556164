"""What planning a large input consists of: work that is done here or in another process, by whoever has time for it."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import pyarrow as pa

from ...storage.ledger.records import NewShard
from ...storage.readers import InputRow
from ...storage.rows.external_sort import Item
from ...storage.rows.spool import write_shard
from .custom_ids import Repeats
from .rows_planner import PlannedRun, RowsPlanner

Result = TypeVar("Result", covariant=True)


class Work(Protocol[Result]):
    """Can be pickled. `done_by` gives the same wherever it is called, and may be called again."""

    def done_by(self, planner: RowsPlanner) -> Result: ...


@dataclass(frozen=True)
class PlanRows:
    """Plan rows that follow each other in the input."""

    rows: Sequence[InputRow]

    def done_by(self, planner: RowsPlanner) -> PlannedRun:
        return planner.plan(self.rows)

    def __reduce__(self) -> tuple[Callable[..., "PlanRows"], tuple[Any, ...]]:
        # As plain tuples: several times as fast to pickle.
        return _rows_of, ([tuple(row) for row in self.rows],)


def _rows_of(rows: Sequence[tuple[Any, ...]]) -> PlanRows:
    return PlanRows(list(map(InputRow._make, rows)))


class WrittenShard(NamedTuple):
    """`rows`: the numbers of its rows, of type "q"."""

    shard: NewShard
    rows: "array[int]"


@dataclass(frozen=True)
class WriteShard:
    """Spool a shard. `items`: its rows as they were sorted; `repeats`: theirs at least."""

    number: int
    path: Path
    items: Sequence[Item]
    repeats: Repeats
    schema: pa.Schema

    def done_by(self, planner: RowsPlanner) -> WrittenShard:
        """Raises StorageError."""
        rows = self.repeats.rows(self.items)
        write_shard(self.path, rows, self.schema)
        shard = NewShard(self.number, len(rows), str(self.path))
        return WrittenShard(shard, array("q", (row.row for row in rows)))
