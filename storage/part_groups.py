"""The rows of a data set of any number of parts, some hundred parts at a time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from .output_folder import OutputFolder

if TYPE_CHECKING:
    import pyarrow.dataset as ds

# Arrow keeps what the end of each file of a data set says for as long as there is the data set: 100 kB a part.
_GROUP_PARTS = 256


@dataclass(frozen=True)
class PartGroups:
    """Committed parts of a folder; those that are gone are left out. Reading raises as `OutputFolder.dataset` says."""

    folder: OutputFolder
    names: Sequence[str]

    def __iter__(self) -> "Iterator[ds.Dataset]":
        """Those of which any part is there."""
        # All at once: a store is listed for it.
        there = self.folder.find_parts(self.names)
        for start in range(0, len(there), _GROUP_PARTS):
            if (group := self.folder.dataset(there[start : start + _GROUP_PARTS])).files:
                yield group

    def batches(self, num_rows: int) -> Iterator[pa.Table]:
        """The rows of a part after the other, so many at a time at most."""
        for group in self:
            for part in group.get_fragments():
                for batch in part.to_batches(schema=group.schema, batch_size=num_rows):
                    yield pa.Table.from_batches([batch])

    def tables(self, columns: Sequence[str] | None = None, filter: "ds.Expression | None" = None) -> Iterator[pa.Table]:
        """The rows of a group after the other: all columns or these, all rows or those that the filter lets through."""
        for group in self:
            yield group.to_table(columns=None if columns is None else list(columns), filter=filter)
