"""Where the rows of a job's data set are: a page of them is then read from the parts that hold it, and no others."""

import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ..storage.errors import PartMissing
from ..storage.ledger import Ledger
from ..storage.output_address import open_folder
from ..storage.output_folder import OutputFolder
from ..storage.records import JobRecord, JobState

Result = TypeVar("Result")
# Reading a part is waiting, for a disk or a store.
_THREADS = 8
# So many parts are asked for before the first of them is taken in.
_PARTS_AT_ONCE = 512
_STEP_ROWS = 1 << 16
# Attempts merge their parts meanwhile; a look reads only what has come since the one before.
_MAX_LOOKS = 50
# A quarter of a gigabyte.
_MAX_ROWS = 1 << 26
# However small they are.
_MAX_JOBS = 1024


@dataclass(frozen=True)
class FirstRows:
    """Some rows in the input's order; `has_more`: whether others follow that are committed."""

    table: pa.Table
    has_more: bool


class RowIndex:
    """Which committed part each row of a job is in, by the row's number: four bytes a row. Thread-safe.

    Each part's rows are read once, when it is met first; a part that is gone is left out for as long as it is.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # By numbers of our own: the id of a part that is gone SQLite gives to the next one. 0 is no part's.
        self._part_numbers = np.zeros(0, np.int32)
        self._names: dict[int, str] = {}
        self._num_met = 0
        self._gone: frozenset[str] = frozenset()
        # When the job completed whose parts these are: it has no others then.
        self._completed_at: float | None = None

    @property
    def num_rows(self) -> int:
        """Room for so many."""
        return len(self._part_numbers)

    def first_rows(self, ledger: Ledger, job: JobRecord, limit: int, after_row: int | None = None) -> FirstRows:
        """The first `limit` rows committed so far, of those that follow the row `after_row`.

        Takes memory for them. Raises StorageError.
        """
        folder = open_folder(job.output_dir)
        for _ in range(_MAX_LOOKS):
            with self._lock:
                self._learn(ledger, job, folder)
                found = self._find(0 if after_row is None else after_row + 1, limit + 1)
                names = {part: self._names[part] for part in np.unique(self._part_numbers[found[:limit]]).tolist()}
            table, gone = _read(folder, names, found[:limit])
            if not gone:
                break
            # Removed by hand, or others by now are in their place.
            self._forget(gone)
        return FirstRows(table, len(found) > limit)

    def _learn(self, ledger: Ledger, job: JobRecord, folder: OutputFolder) -> None:
        if self._completed_at is not None and self._completed_at == job.finished_at:
            return
        # In this order: a job that had completed before has all its parts.
        names = ledger.part_names(job.id)
        for _ in range(_MAX_LOOKS):
            self._take_in(folder, names)
            # Removed by hand, unless others are in their place by now.
            if not self._gone or self._gone <= set(names := ledger.part_names(job.id)):
                break
        is_whole = job.state is JobState.COMPLETED and not self._gone
        self._completed_at = job.finished_at if is_whole else None

    def _take_in(self, folder: OutputFolder, names: Sequence[str]) -> None:
        """Know these parts and no others."""
        known, committed = set(self._names.values()), set(names)
        self._names = {part: name for part, name in self._names.items() if name in committed}
        new = [name for name in names if name not in known and name not in self._gone]
        # One look for all of them: they may be thousands.
        new += folder.find_parts(sorted(self._gone & committed))
        for start in range(0, len(new), _PARTS_AT_ONCE):
            self._read_rows(folder, new[start : start + _PARTS_AT_ONCE])
        self._gone = frozenset(committed.difference(self._names.values()))

    def _read_rows(self, folder: OutputFolder, new: Sequence[str]) -> None:
        names = dict(enumerate(new, self._num_met + 1))
        self._num_met += len(names)
        for part, table in _read_all(folder, names, ["row"]):
            if table is not None:
                rows = table["row"].to_numpy()
                self._make_room(int(rows.max(initial=-1)) + 1)
                self._part_numbers[rows] = part
                self._names[part] = names[part]

    def _make_room(self, num_rows: int) -> None:
        if num_rows > len(self._part_numbers):
            room = np.zeros(max(num_rows, len(self._part_numbers) * 9 // 8), np.int32)
            room[: len(self._part_numbers)] = self._part_numbers
            self._part_numbers = room

    def _find(self, start: int, count: int) -> npt.NDArray[np.int64]:
        """The first rows from `start` on that a known part has."""
        known = np.fromiter(self._names, np.int32)
        found = np.zeros(0, np.int64)
        for begin in range(start, len(self._part_numbers), _STEP_ROWS):
            step = self._part_numbers[begin : begin + _STEP_ROWS]
            found = np.concatenate((found, begin + np.flatnonzero(np.isin(step, known))))
            if len(found) >= count:
                break
        return found[:count]

    def _forget(self, parts: Iterable[int]) -> None:
        with self._lock:
            self._completed_at = None
            for part in parts:
                self._names.pop(part, None)


class RowIndexes:
    """Those of the jobs that were read last: a thousand at most, of some million rows together. Thread-safe."""

    def __init__(self, max_rows: int = _MAX_ROWS, max_jobs: int = _MAX_JOBS) -> None:
        self._max_rows = max_rows
        self._max_jobs = max_jobs
        self._lock = threading.Lock()
        self._indexes: OrderedDict[str, RowIndex] = OrderedDict()

    def of(self, job_id: str) -> RowIndex:
        with self._lock:
            index = self._indexes.setdefault(job_id, RowIndex())
            self._indexes.move_to_end(job_id)
            # One is kept however large it is.
            while len(self._indexes) > 1 and self._are_too_many():
                self._indexes.popitem(last=False)
        return index

    def _are_too_many(self) -> bool:
        num_rows = sum(index.num_rows for index in self._indexes.values())
        return len(self._indexes) > self._max_jobs or num_rows > self._max_rows


def _read(folder: OutputFolder, names: dict[int, str], rows: npt.NDArray[np.int64]) -> tuple[pa.Table, list[int]]:
    """These rows of these parts, in order, and the parts that are gone."""
    wanted = pa.array(rows)
    tables, gone = [], []
    for part, table in _read_all(folder, names, wanted=wanted):
        if table is None:
            gone.append(part)
        else:
            tables.append(table)
    return pa.concat_tables(tables).sort_by("row") if tables else pa.table({}), gone


def _read_all(
    folder: OutputFolder, names: dict[int, str], columns: Collection[str] | None = None, wanted: pa.Array | None = None
) -> Iterable[tuple[int, pa.Table | None]]:
    """Each part with the columns and rows that are wanted of it; None where it is gone."""

    def read(name: str) -> pa.Table | None:
        try:
            table = folder.read_part(name, None if columns is None else list(columns))
        except PartMissing:
            return None
        return table if wanted is None else table.filter(pc.is_in(table["row"], wanted))

    with ThreadPoolExecutor(min(_THREADS, len(names)) or 1) as pool:
        yield from zip(names, pool.map(read, names.values()), strict=True)
