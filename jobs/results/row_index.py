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

from ...storage.errors import PartMissing
from ...storage.ledger.ledger import Ledger
from ...storage.ledger.records import JobRecord, JobState
from ...storage.output.address import open_folder
from ...storage.output.folder import OutputFolder
from .planned_shards import PlannedShards

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

    A part's rows are read once, when a row is wanted of the shard that it was written for; all at once where it is not
    known which rows a shard has. A part that is gone is left out for as long as it is.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._planned: PlannedShards | None = None
        # Of each row the part that it was found in, else ~ its shard.
        # By numbers of our own: the id of a part that is gone SQLite gives to the next one. 0 is no part's.
        self._places = np.zeros(0, np.int32)
        # The parts whose rows are known.
        self._names: dict[int, str] = {}
        # The shards of all parts that were ever read, by their numbers.
        self._shards_of_parts = [0]
        # The other parts, and whose they are.
        self._unread: dict[str, int] = {}
        self._gone: dict[str, int] = {}
        # When the job completed whose parts these are: it has no others then.
        self._completed_at: float | None = None

    @property
    def num_rows(self) -> int:
        """Room for so many."""
        return len(self._places)

    def first_rows(self, ledger: Ledger, job: JobRecord, limit: int, after_row: int | None = None) -> FirstRows:
        """The first `limit` rows committed so far, of those that follow the row `after_row`.

        Takes memory for them. Raises StorageError.
        """
        folder = open_folder(job.output_dir)
        start = 0 if after_row is None else after_row + 1
        for _ in range(_MAX_LOOKS):
            with self._lock:
                found = self._committed(ledger, job, folder, start, limit + 1)
                names = {part: self._names[part] for part in np.unique(self._places[found[:limit]]).tolist()}
            table, gone = _read(folder, names, found[:limit])
            if not gone:
                break
            # Removed by hand, or others by now are in their place.
            self._forget(gone)
        return FirstRows(table, len(found) > limit)

    def _committed(
        self, ledger: Ledger, job: JobRecord, folder: OutputFolder, start: int, count: int
    ) -> npt.NDArray[np.int64]:
        """The first rows from `start` on that are in a part, which is known then."""
        self._learn(ledger, job, folder)
        for _ in range(_MAX_LOOKS):
            found = self._find(folder, start, count)
            # Removed by hand, unless others are in their place by now.
            if not self._gone or self._gone.keys() <= set(ledger.part_names(job.id)):
                break
            self._learn(ledger, job, folder)
        return found

    def _learn(self, ledger: Ledger, job: JobRecord, folder: OutputFolder) -> None:
        """Know which parts there are."""
        if self._completed_at is not None and self._completed_at == job.finished_at and not self._gone:
            return
        # In this order: a job that had completed before has all its parts.
        names = ledger.part_names(job.id)
        if self._planned is None or not self._planned.knows(self._new(names)):
            self._planned = self._begin(ledger, job)
        self._take_in(self._planned, folder, names)
        self._completed_at = job.finished_at if job.state is JobState.COMPLETED else None

    def _begin(self, ledger: Ledger, job: JobRecord) -> PlannedShards:
        """As if no part had been read."""
        planned, of_rows = PlannedShards.of(ledger, job)
        self._places = np.invert(of_rows, out=of_rows)
        self._names, self._unread, self._gone = {}, {}, {}
        self._shards_of_parts = [0]
        return planned

    def _take_in(self, planned: PlannedShards, folder: OutputFolder, names: Sequence[str]) -> None:
        committed = set(names)
        self._names = {part: name for part, name in self._names.items() if name in committed}
        self._unread = {name: shard for name, shard in self._unread.items() if name in committed}
        self._gone = {name: shard for name, shard in self._gone.items() if name in committed}
        new = self._new(names)
        # One look for all of them: they may be thousands.
        self._unread |= {name: self._gone.pop(name) for name in folder.find_parts(sorted(self._gone))}
        self._unread |= zip(new, planned.of_parts(new), strict=True)

    def _new(self, names: Sequence[str]) -> list[str]:
        known = {*self._names.values(), *self._unread, *self._gone}
        return [name for name in names if name not in known]

    def _find(self, folder: OutputFolder, start: int, count: int) -> npt.NDArray[np.int64]:
        """The first rows from `start` on that a known part has, after reading those that might have them."""
        while True:
            found = self._first(start, count)
            shards = self._shards_of(found)
            parts = [name for name, shard in self._unread.items() if shard in shards]
            if not parts:
                return found
            for begin in range(0, len(parts), _PARTS_AT_ONCE):
                self._read_rows(folder, parts[begin : begin + _PARTS_AT_ONCE])

    def _first(self, start: int, count: int) -> npt.NDArray[np.int64]:
        """The first rows from `start` on that a known part has, or that one might have that is not read yet."""
        assert self._planned is not None
        is_unread = np.zeros(self._planned.num_shards, bool)
        is_unread[list(self._unread.values())] = True
        is_wanted = is_unread[self._shards_of_parts]
        is_wanted[0] = False
        is_wanted[list(self._names)] = True
        # Places below 0 are counted from the end.
        of_places = np.concatenate((is_wanted, is_unread[::-1]))
        found = np.zeros(0, np.int64)
        for begin in range(start, len(self._places), _STEP_ROWS):
            step = self._places[begin : begin + _STEP_ROWS]
            found = np.concatenate((found, begin + np.flatnonzero(of_places[step])))
            if len(found) >= count:
                break
        return found[:count]

    def _shards_of(self, rows: npt.NDArray[np.int64]) -> set[int]:
        """Of those rows that no known part has."""
        places = set(self._places[rows].tolist()) - self._names.keys()
        return {self._shards_of_parts[place] if place >= 0 else ~place for place in places}

    def _read_rows(self, folder: OutputFolder, names: Sequence[str]) -> None:
        parts = dict(enumerate(names, len(self._shards_of_parts)))
        for part, table in _read_all(folder, parts, ["row"]):
            name = parts[part]
            shard = self._unread.pop(name)
            # One at a time: those behind one that is damaged are tried again, with other numbers.
            self._shards_of_parts.append(shard)
            if table is None:
                self._gone[name] = shard
            else:
                rows = table["row"].to_numpy()
                self._make_room(int(rows.max(initial=-1)) + 1)
                self._places[rows] = part
                self._names[part] = name

    def _make_room(self, num_rows: int) -> None:
        if num_rows > len(self._places):
            room = np.full(max(num_rows, len(self._places) * 9 // 8), ~0, np.int32)
            room[: len(self._places)] = self._places
            self._places = room

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
