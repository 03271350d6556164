"""The rows of a data set of any number of parts, some hundred parts at a time."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from ..errors import PartDamaged, PartMissing
from .folder import OutputFolder

if TYPE_CHECKING:
    import pyarrow.dataset as ds

# Arrow keeps what the end of each file of a data set says for as long as there is the data set: 100 kB a part.
_GROUP_PARTS = 256
# Of a group whose parts are given their names while it is read.
_MAX_READS = 100


@dataclass(frozen=True)
class PartGroups:
    """Committed parts of a folder; those that are gone are left out.

    `names_now`: which there are by now. With it the parts that have taken the place of others are read in the end, but
    for the rows that have been, whose numbers take a byte each: so rows are neither missed nor repeated while attempts
    merge their parts or failed rows are tried again. `may_miss`: whether a part that only its file is gone of, as if
    removed by hand, is left out rather than told with PartMissing.
    """

    folder: OutputFolder
    names: Sequence[str]
    names_now: Callable[[], Collection[str]] | None = None
    may_miss: bool = True

    def batches(self, num_rows: int) -> Iterator[pa.Table]:
        """The rows of a part after the other, so many at a time at most. Raises PartDamaged, PartMissing."""
        walk = _Walk(self)
        for names in walk.rounds():
            for name in names:
                if (part := self._open(name)) is None:
                    walk.gone.add(name)
                    continue
                with part:
                    for batch in self._batches(name, part, num_rows):
                        yield from walk.fresh(pa.Table.from_batches([batch]))

    def tables(self, columns: Sequence[str] | None = None, filter: "ds.Expression | None" = None) -> Iterator[pa.Table]:
        """The rows of a group after the other: all columns or, of these, those that there are, `row` among them where
        parts may be merged; all rows or those that the filter lets through. Raises PartDamaged, PartMissing.
        """
        walk = _Walk(self)
        for names in walk.rounds():
            # All at once: a store is listed for it.
            there = self.folder.find_parts(names)
            walk.gone.update(set(names).difference(there))
            for start in range(0, len(there), _GROUP_PARTS):
                if (table := self._read(there[start : start + _GROUP_PARTS], columns, filter, walk.gone)) is not None:
                    yield from walk.fresh(table)

    def _open(self, name: str) -> pq.ParquetFile | None:
        try:
            return self.folder.open_part(name)
        except PartMissing:
            return None
        except (OSError, pa.ArrowException) as error:
            raise self._damaged(f"part {self.folder}/{name}", error) from error

    def _batches(self, name: str, part: pq.ParquetFile, num_rows: int) -> Iterator[pa.RecordBatch]:
        try:
            yield from part.iter_batches(num_rows)
        except (OSError, pa.ArrowException) as error:
            raise self._damaged(f"part {self.folder}/{name}", error) from error

    def _damaged(self, part: str, error: Exception) -> PartDamaged:
        why = " ".join(str(error).split())
        advice = f"remove it to read the others, and run --resume for its rows ({why})" if self.may_miss else why
        return PartDamaged(f"{part} cannot be read: {advice}")

    def _read(
        self, names: Sequence[str], columns: Sequence[str] | None, filter: "ds.Expression | None", gone: set[str]
    ) -> pa.Table | None:
        """What is wanted of these parts; None when they are all `gone`, to which those are added that are."""
        for _ in range(_MAX_READS):
            try:
                return self._read_at_once(names, columns, filter)
            except FileNotFoundError:
                there = self.folder.find_parts(names)
                gone.update(set(names).difference(there))
                names = there
            except (OSError, pa.ArrowException) as error:
                raise self._damaged(f"a part of {self.folder}", error) from error
        raise PartMissing(f"parts of {self.folder} come and go faster than they are read: try again")

    def _read_at_once(
        self, names: Sequence[str], columns: Sequence[str] | None, filter: "ds.Expression | None"
    ) -> pa.Table | None:
        if not names:
            return None
        group = self.folder.dataset(names)
        wanted = None if columns is None else [name for name in columns if name in group.schema.names]
        return group.to_table(columns=wanted, filter=filter)


@dataclass
class _Walk:
    """Once through some parts and what takes their places. `gone`: those of a round that were not there."""

    parts: PartGroups
    gone: set[str] = field(default_factory=set)
    _seen: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))

    def rounds(self) -> Iterator[Sequence[str]]:
        """The names of parts to read, until none is gone that another has taken the place of."""
        names, met = self.parts.names, set(self.parts.names)
        while names:
            yield names
            now = self._names_now() if self.gone else []
            if not self.parts.may_miss and (missing := self.gone.intersection(now)):
                raise PartMissing(f"part {self.parts.folder}/{min(missing)} is gone: it was removed")
            # A row of one that is gone is now in one that was not there before.
            names = [name for name in now if name not in met] if self.gone.difference(now) else []
            met.update(names)
            self.gone.clear()

    def _names_now(self) -> Collection[str]:
        return self.gone if self.parts.names_now is None else self.parts.names_now()

    def fresh(self, table: pa.Table) -> Iterator[pa.Table]:
        """Those rows that have not been read before, if there are any or none was read."""
        if self.parts.names_now is not None and len(table):
            rows = table["row"].to_numpy()
            self._make_room(int(rows.max()) + 1)
            is_new = ~self._seen[rows]
            self._seen[rows] = True
            if not is_new.all():
                table = table.filter(pa.array(is_new))
        yield table

    def _make_room(self, num_rows: int) -> None:
        if (more := num_rows - len(self._seen)) > 0:
            self._seen = np.concatenate((self._seen, np.zeros(more + len(self._seen) // 8, np.bool_)))
