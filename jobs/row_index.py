"""Where the rows of a job's data set are: a page of them is then read from the parts that hold it, and no others."""

import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable
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
from ..storage.records import JobRecord

Result = TypeVar("Result")
# Reading a part is waiting, for a disk or a store.
_THREADS = 8
# So many parts are asked for before the first of them is taken in.
_PARTS_AT_ONCE = 512
_STEP_ROWS = 1 << 16
_MAX_LOOKS = 5
# A quarter of a gigabyte.
_MAX_ROWS = 1 << 26


@dataclass(frozen=True)
class FirstRows:
    """Some rows in the input's order; `has_more`: whether others follow that are committed."""

    table: pa.Table
    has_more: bool


class RowIndex:
    """Which committed part each row of a job is in, by the row's number: four bytes a row. Thread-safe.

    Each part's rows are read once, when it is met first; a part that is gone is left out.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._part_ids = np.zeros(0, np.int32)
        self._names: dict[int, str] = {}
        # When the job ended whose parts these are: it has no others then.
        self._ended_at: float | None = None

    @property
    def num_rows(self) -> int:
        """Room for so many."""
        return len(self._part_ids)

    def first_rows(self, ledger: Ledger, job: JobRecord, limit: int, after_row: int | None = None) -> FirstRows:
        """The first `limit` rows committed so far, of those that follow the row `after_row`.

        Takes memory for them. Raises StorageError.
        """
        folder = open_folder(job.output_dir)
        for _ in range(_MAX_LOOKS):
            with self._lock:
                self._learn(ledger, job, folder)
                found = self._find(0 if after_row is None else after_row + 1, limit + 1)
                names = {part_id: self._names[part_id] for part_id in np.unique(self._part_ids[found[:limit]]).tolist()}
            table, gone = _read(folder, names, found[:limit])
            if not gone:
                break
            # Removed by hand, or others by now are in their place.
            self._forget(gone)
        return FirstRows(table, len(found) > limit)

    def _learn(self, ledger: Ledger, job: JobRecord, folder: OutputFolder) -> None:
        if self._ended_at is not None and self._ended_at == job.finished_at:
            return
        # In this order: a job that had ended before has all its parts.
        names = ledger.part_names(job.id)
        self._names = {part_id: name for part_id, name in self._names.items() if part_id in names}
        new = [item for item in names.items() if item[0] not in self._names]
        for start in range(0, len(new), _PARTS_AT_ONCE):
            self._take_in(folder, dict(new[start : start + _PARTS_AT_ONCE]))
        self._ended_at = job.finished_at

    def _take_in(self, folder: OutputFolder, names: dict[int, str]) -> None:
        for part_id, table in _read_all(folder, names, ["row"]):
            if table is not None:
                rows = table["row"].to_numpy()
                self._make_room(int(rows.max(initial=-1)) + 1)
                self._part_ids[rows] = part_id
                self._names[part_id] = names[part_id]

    def _make_room(self, num_rows: int) -> None:
        if num_rows > len(self._part_ids):
            room = np.zeros(max(num_rows, len(self._part_ids) * 9 // 8), np.int32)
            room[: len(self._part_ids)] = self._part_ids
            self._part_ids = room

    def _find(self, start: int, count: int) -> npt.NDArray[np.int64]:
        """The first rows from `start` on that a known part has."""
        known = np.fromiter(self._names, np.int32)
        found = np.zeros(0, np.int64)
        for begin in range(start, len(self._part_ids), _STEP_ROWS):
            step = self._part_ids[begin : begin + _STEP_ROWS]
            found = np.concatenate((found, begin + np.flatnonzero(np.isin(step, known))))
            if len(found) >= count:
                break
        return found[:count]

    def _forget(self, part_ids: Iterable[int]) -> None:
        with self._lock:
            self._ended_at = None
            for part_id in part_ids:
                self._names.pop(part_id, None)


class RowIndexes:
    """Those of the jobs that were read last, of at most some million rows together. Thread-safe."""

    def __init__(self, max_rows: int = _MAX_ROWS) -> None:
        self._max_rows = max_rows
        self._lock = threading.Lock()
        self._indexes: OrderedDict[str, RowIndex] = OrderedDict()

    def of(self, job_id: str) -> RowIndex:
        with self._lock:
            index = self._indexes.setdefault(job_id, RowIndex())
            self._indexes.move_to_end(job_id)
            # One is kept however large it is.
            while len(self._indexes) > 1 and sum(each.num_rows for each in self._indexes.values()) > self._max_rows:
                self._indexes.popitem(last=False)
        return index


def _read(folder: OutputFolder, names: dict[int, str], rows: npt.NDArray[np.int64]) -> tuple[pa.Table, list[int]]:
    """These rows of these parts, in order, and the parts that are gone."""
    wanted = pa.array(rows)
    tables, gone = [], []
    for part_id, table in _read_all(folder, names, wanted=wanted):
        if table is None:
            gone.append(part_id)
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
