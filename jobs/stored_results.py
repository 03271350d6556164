"""What a job has answered by now, from its committed parts."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from ..storage.ledger import Ledger
from ..storage.output_address import open_folder
from ..storage.records import JobRecord

if TYPE_CHECKING:
    import pyarrow.dataset as ds

T = TypeVar("T")
_MAX_READS = 5


def read_results(ledger: Ledger, job: JobRecord) -> pa.Table:
    """All rows of a job committed so far, in the input's order."""
    return read_parts(ledger, job, _sorted_rows)


def _sorted_rows(parts: "ds.Dataset") -> pa.Table:
    return parts.to_table().sort_by("row") if parts.files else pa.table({})


@dataclass(frozen=True)
class FirstRows:
    """Some rows in the input's order; `in_all`: how many there are to choose from."""

    table: pa.Table
    in_all: int


def read_first_rows(ledger: Ledger, job: JobRecord, limit: int, after_row: int | None = None) -> FirstRows:
    """The first `limit` rows of a job committed so far, of those that follow the row `after_row`.

    Takes memory for them and for the numbers of all rows that follow it; of the parts the groups of rows are read in
    which they are.
    """
    return read_parts(ledger, job, lambda parts: _first_rows(parts, limit, after_row))


def _first_rows(parts: "ds.Dataset", limit: int, after_row: int | None) -> FirstRows:
    if not parts.files:
        return FirstRows(pa.table({}), 0)
    is_after = pc.field("row") > after_row if after_row is not None else None
    numbers = parts.to_table(columns=["row"], filter=is_after)["row"]
    wanted = numbers.take(pc.select_k_unstable(numbers, min(limit, len(numbers)), [("row", "ascending")]))
    if not len(wanted):
        return FirstRows(pa.table({}), 0)
    span = pc.min_max(wanted)
    in_span = (pc.field("row") >= span["min"]) & (pc.field("row") <= span["max"])
    return FirstRows(parts.to_table(filter=in_span).sort_by("row"), len(numbers))


def read_parts(ledger: Ledger, job: JobRecord, read: "Callable[[ds.Dataset], T]") -> T:
    """What `read` makes of a job's committed parts, each row in them once.

    It is called again when a part was renamed or replaced under its hands.
    """
    for _ in range(_MAX_READS - 1):
        with suppress(FileNotFoundError):
            return read(_committed_parts(ledger, job))
    return read(_committed_parts(ledger, job))


def _committed_parts(ledger: Ledger, job: JobRecord) -> "ds.Dataset":
    # A part may have been deleted by hand: what is there can still be read.
    return open_folder(job.output_dir).dataset([part.file_name for part in ledger.parts(job.id)])


def first_error(ledger: Ledger, job: JobRecord) -> str | None:
    """The error of the first of a job's failed rows."""
    return read_parts(ledger, job, _first_error)


def _first_error(parts: "ds.Dataset") -> str | None:
    if not parts.files:
        return None
    failed = parts.to_table(columns=["row", "error"], filter=pc.field("error").is_valid())
    if not len(failed):
        return None
    first = failed.sort_by("row").slice(0, 1).to_pylist()[0]
    return f"(row {first['row']}): {first['error']}"
