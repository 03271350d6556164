"""Which shard each row of a job was planned into: who wants some rows then knows whose parts may have them."""

import os
from array import array
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from ..errors import StorageError
from ..files import sync_folder, write_parquet
from .spool import read_shard

# Beside the spooled shards; it stays when these have gone.
PLANNED_ROWS = "planned-rows.parquet"
# The parts of so few are looked through in an instant.
_FEW_SHARDS = 64
_GROUP_ROWS = 1 << 18
_SCHEMA = pa.schema([pa.field("row", pa.int64()), pa.field("shard", pa.int32())])


@dataclass
class PlannedRows:
    """Takes the rows of one shard after the other."""

    path: Path
    _rows: "array[int]" = field(default_factory=lambda: array("q"))
    _shards: "array[int]" = field(default_factory=lambda: array("i"))
    _num_shards: int = 0
    _writer: pq.ParquetWriter | None = None

    def add(self, shard: int, rows: "array[int]") -> None:
        """`rows`: their numbers, of type "q". Raises StorageError."""
        self._num_shards += 1
        self._rows.extend(rows)
        self._shards.extend(repeat(shard, len(rows)))
        if len(self._rows) >= _GROUP_ROWS and self._num_shards > _FEW_SHARDS:
            with self._writing():
                self._write()

    def finish(self) -> None:
        """Have it all on the disk. Raises StorageError."""
        if self._num_shards <= _FEW_SHARDS:
            return
        with self._writing():
            self._write()
            self.close()
            with self.path.open("rb") as file:
                os.fsync(file.fileno())
            sync_folder(self.path.parent)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StorageError(f"cannot write {self.path}: {error.strerror or error}") from error

    def _write(self) -> None:
        if self._writer is None:
            # A dictionary of the rows would have each of them.
            self._writer = pq.ParquetWriter(self.path, _SCHEMA, compression="zstd", use_dictionary=["shard"])
        columns = [np.frombuffer(self._rows, np.int64), np.frombuffer(self._shards, np.int32)]
        self._writer.write_table(pa.table(columns, schema=_SCHEMA))
        self._rows, self._shards = array("q"), array("i")


@contextmanager
def planned_rows(folder: Path) -> Iterator[PlannedRows]:
    """Writes `PLANNED_ROWS` into a folder that is there once shards are spooled; nothing for a job of few shards.

    Raises StorageError.
    """
    rows = PlannedRows(folder / PLANNED_ROWS)
    try:
        yield rows
        rows.finish()
    finally:
        # The disk that was full may be so still.
        with suppress(OSError):
            rows.close()


def read_planned_shards(folder: Path, num_rows: int) -> npt.NDArray[np.int32] | None:
    """The shard of each row of the job that is spooled there; None where that is not written down, or not readable."""
    found = np.full(num_rows, -1, np.int32)
    try:
        with pq.ParquetFile(folder / PLANNED_ROWS) as file:
            for batch in file.iter_batches(_GROUP_ROWS):
                found[batch["row"].to_numpy()] = batch["shard"].to_numpy()
    except (OSError, pa.ArrowException, IndexError, KeyError):
        return None
    return None if found.min(initial=0) < 0 else found


def plan_anew(folder: Path, num_rows: int, shards: Mapping[int, Path]) -> None:
    """Have the rows that are spooled in these files be those shards', by number, and no longer others'.

    Where it was not written down whose rows are whose, it is not then either. Raises StorageError.
    """
    if (of_rows := read_planned_shards(folder, num_rows)) is None:
        return
    for number, path in shards.items():
        of_rows[read_shard(path)["row"].to_numpy()] = number
    table = pa.table([np.arange(num_rows), of_rows], schema=_SCHEMA)
    write_parquet(folder / PLANNED_ROWS, table)
