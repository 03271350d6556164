"""What a job has answered by now, from its committed parts."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ...storage.ledger.ledger import Ledger
from ...storage.ledger.records import JobRecord, PartRecord
from ...storage.output.address import open_folder
from ...storage.output.part_groups import PartGroups
from ...storage.rows.external_sort import ExternalSorter
from ..shards.part_schema import part_schema
from ..spec.schemas import JobSpec
from ..spec.stored import read_stored

_SORT_MEMORY_BYTES = 256 * 1024**2
_BATCH_ROWS = 2048


def read_results(ledger: Ledger, job: JobRecord) -> pa.Table:
    """All rows of a job committed so far, in the input's order. Raises PartDamaged, PartMissing.

    While there are none the answer's columns are there, without the input's.
    """
    if tables := list(committed_parts(ledger, job, may_miss=False).tables()):
        return pa.concat_tables(tables).sort_by("row")
    return part_schema(read_stored(JobSpec, job.spec), []).empty_table()


@contextmanager
def sorted_lines(
    ledger: Ledger,
    job: JobRecord,
    sort_folder: Path,
    lines_of: Callable[[pa.Table], Iterable[str]],
) -> Iterator[Iterator[str]]:
    """A line for each row committed so far, in the input's order; `lines_of` makes those of some rows, in their order.

    What does not fit into some memory is sorted in `sort_folder`.
    """
    with ExternalSorter(sort_folder, _SORT_MEMORY_BYTES) as sorter:
        for rows in committed_parts(ledger, job).batches(_BATCH_ROWS):
            keys = (number.to_bytes(8) for number in rows["row"].to_pylist())
            sorter.extend(zip(keys, (line.encode() for line in lines_of(rows)), strict=True))
        yield (line.decode() for _, line in sorter)


def committed_parts(
    ledger: Ledger, job: JobRecord, wanted: Callable[[PartRecord], bool] = lambda part: True, may_miss: bool = True
) -> PartGroups:
    """A job's committed parts that are `wanted`, each row in them once. `may_miss`: as `PartGroups` has it."""

    def names() -> list[str]:
        return [part.file_name for part in ledger.parts(job.id) if wanted(part)]

    return PartGroups(open_folder(job.output_dir), names(), names, may_miss)


def num_readable(ledger: Ledger, job: JobRecord) -> int:
    """How many committed rows are in parts that are there: one may have been removed by hand."""
    rows = {part.file_name: part.num_rows for part in ledger.parts(job.id)}
    gone = rows.keys() - open_folder(job.output_dir).find_parts(list(rows))
    # The rows of the others are in those that have taken their places.
    gone &= set(ledger.part_names(job.id)) if gone else set()
    return sum(rows.values()) - sum(rows[name] for name in gone)


def first_error(ledger: Ledger, job: JobRecord) -> str | None:
    """The error of the first of a job's failed rows. Raises PartDamaged."""
    parts = committed_parts(ledger, job, lambda part: part.num_failed > 0)
    failed = (_first_of(table) for table in parts.tables(["row", "error"], pc.field("error").is_valid()))
    first = min((row for row in failed if row is not None), key=itemgetter("row"), default=None)
    return None if first is None else f"(row {first['row']}): {first['error']}"


def _first_of(table: pa.Table) -> Mapping[str, Any] | None:
    rows: list[dict[str, Any]] = table.sort_by("row").slice(0, 1).to_pylist()
    return rows[0] if rows else None
