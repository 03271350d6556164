"""What a job has answered by now, from its committed parts."""

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import pyarrow as pa
import pyarrow.dataset as ds

from ..storage.ledger import Ledger
from ..storage.output_address import open_folder
from ..storage.records import JobRecord

T = TypeVar("T")
_MAX_READS = 5


def read_results(ledger: Ledger, job: JobRecord) -> pa.Table:
    """All rows of a job committed so far, in the input's order."""
    return read_parts(ledger, job, _sorted_rows)


def _sorted_rows(parts: ds.Dataset) -> pa.Table:
    return parts.to_table().sort_by("row") if parts.files else pa.table({})


def read_parts(ledger: Ledger, job: JobRecord, read: Callable[[ds.Dataset], T]) -> T:
    """What `read` makes of a job's committed parts, each row in them once.

    It is called again when a part was renamed or replaced under its hands.
    """
    for _ in range(_MAX_READS - 1):
        with suppress(FileNotFoundError):
            return read(_committed_parts(ledger, job))
    return read(_committed_parts(ledger, job))


def _committed_parts(ledger: Ledger, job: JobRecord) -> ds.Dataset:
    # A part may have been deleted by hand: what is there can still be read.
    return open_folder(job.output_dir).dataset([part.file_name for part in ledger.parts(job.id)])


def first_error(ledger: Ledger, job: JobRecord) -> str | None:
    """The error of the first of a job's failed rows."""
    return read_parts(ledger, job, _first_error)


def _first_error(parts: ds.Dataset) -> str | None:
    if not parts.files:
        return None
    failed = parts.to_table(columns=["row", "error"], filter=ds.field("error").is_valid())
    if not len(failed):
        return None
    first = failed.sort_by("row").slice(0, 1).to_pylist()[0]
    return f"(row {first['row']}): {first['error']}"
