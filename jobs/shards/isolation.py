"""Rows that take their worker with them: tried apart from all others, in ever smaller groups, until they are found."""

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Self

import pyarrow as pa
import pyarrow.compute as pc

from ...storage.ledger.records import AttemptOutcome, AttemptRecord
from ..errors import Stopped
from .faults import WORKER_CRASHED

ALONE = f"{WORKER_CRASHED}the worker died each time it came to this row, even with no other row beside it"

_MAX_CRASHES = 2
# Once may be chance: a machine that goes away takes some row with it, but hardly the same one twice.
_MAX_CRASHES_ALONE = 2
# Few crashes to find a row (a worker takes seconds to come back), few groups to get through when no row is at fault.
_GROUPS_OF_A_TRIAL = 16
_STOP_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class CrashHistory:
    """The attempts at a shard whose worker died. `trials`: what those that tried rows apart were just trying.

    A worker that has begun another attempt since has not died: it was starved for longer than its lease.
    """

    num_crashes: int
    trials: tuple[frozenset[int], ...]

    @classmethod
    def of(cls, attempts: Iterable[AttemptRecord]) -> Self:
        """`attempts`: all at the shard, the oldest first."""
        last = {attempt.owner: attempt for attempt in attempts}.values()
        lost = [attempt for attempt in last if attempt.outcome is AttemptOutcome.LOST]
        trials = (frozenset(attempt.trial_rows) for attempt in lost if attempt.trial_rows)
        return cls(len(lost), tuple(sorted(trials, key=len)))

    @property
    def asks_for_trials(self) -> bool:
        return self.num_crashes >= _MAX_CRASHES

    @property
    def culprits(self) -> frozenset[int]:
        """Rows that were alone in the engine when the worker died, twice."""
        alone = Counter(row for trial in self.trials if len(trial) == 1 for row in trial)
        return frozenset(row for row, crashes in alone.items() if crashes >= _MAX_CRASHES_ALONE)

    def groups(self, rows: Iterable[int]) -> list[list[int]]:
        """Cut rows into the groups to try next, each a sixteenth of the smallest that took a worker with it."""
        circles: dict[frozenset[int] | None, list[int]] = {}
        for row in rows:
            circle = next((trial for trial in self.trials if row in trial), None)
            circles.setdefault(circle, []).append(row)
        return [group for members in circles.values() for group in _cut(members)]


def _cut(rows: Sequence[int]) -> list[list[int]]:
    size = -(-len(rows) // _GROUPS_OF_A_TRIAL)
    return [list(rows[start : start + size]) for start in range(0, len(rows), size)]


def rows_of(table: pa.Table, rows: Collection[int]) -> pa.Table:
    """The part of a spooled shard that holds these rows."""
    return table.filter(pc.is_in(table["row"], pa.array(list(rows), pa.int64())))


def condemned(table: pa.Table, error: str) -> pa.Table:
    """A spooled shard none of whose rows is to reach the engine; what was wrong with a row before stays."""
    column = table.schema.get_field_index("plan_error")
    return table.set_column(column, table.field(column), pc.coalesce(table["plan_error"], pa.scalar(error)))


@dataclass
class EngineRoom:
    """Who has rows in a worker's engine: many attempts together, or one alone. Thread-safe.

    An attempt that wants to be alone waits until the others have left; meanwhile nobody enters.
    """

    _changed: threading.Condition = field(default_factory=threading.Condition)
    _num_inside: int = 0
    _is_reserved: bool = False

    @contextmanager
    def together(self, stop: threading.Event) -> Iterator[None]:
        """Raises `Stopped` when `stop` is set while waiting."""
        with self._changed:
            self._wait_while(stop, lambda: self._is_reserved)
            self._num_inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_inside -= 1
                self._changed.notify_all()

    @contextmanager
    def alone(self, stop: threading.Event) -> Iterator[None]:
        """Raises `Stopped` when `stop` is set while waiting."""
        with self._changed:
            self._wait_while(stop, lambda: self._is_reserved)
            self._is_reserved = True
        try:
            with self._changed:
                self._wait_while(stop, lambda: self._num_inside > 0)
            yield
        finally:
            with self._changed:
                self._is_reserved = False
                self._changed.notify_all()

    def _wait_while(self, stop: threading.Event, occupied: Callable[[], bool]) -> None:
        while occupied():
            if stop.is_set():
                raise Stopped
            self._changed.wait(_STOP_POLL_SECONDS)
