"""A job's results as one file: Parquet, an Arrow stream or JSON lines, made while it is sent.

What is sent are the rows that were committed when it began, and those that a part which took others' place has
beside them. Memory holds some thousand rows of it at a time.
"""

import json
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from itertools import chain
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ...storage.ledger.ledger import Ledger
from ...storage.ledger.records import JobRecord
from ...storage.output.part_groups import PartGroups
from ..shards.part_schema import part_schema
from ..spec.schemas import JobSpec
from ..spec.stored import read_stored
from .json_lines import json_rows
from .stored_results import committed_parts

# A row group of the Parquet file, a batch of the Arrow stream.
_GROUP_ROWS = 16384
_GROUP_BYTES = 16 * 2**20
_READ_ROWS = 2048


class _Pipe:
    """A file to write to, whose bytes are taken out on the other side."""

    closed = False

    def __init__(self) -> None:
        self._written: list[bytes] = []

    def write(self, data: bytes) -> int:
        # Arrow's own memory, which is gone when this returns.
        self._written.append(bytes(data))
        return len(data)

    def flush(self) -> None: ...

    def close(self) -> None: ...

    def take(self) -> bytes:
        taken, self._written = b"".join(self._written), []
        return taken


def export(ledger: Ledger, job: JobRecord, write: "Writer") -> Iterator[bytes]:
    """The pieces of a file with all rows committed by now. Raises StorageError while it is read, when a part is gone.

    The rows are about in the order in which they were committed: `row` says where each was in the input.
    """
    return write(_Tables(committed_parts(ledger, job, may_miss=False), job))


class _Tables:
    """The rows of some parts, in groups of a bounded size."""

    def __init__(self, parts: PartGroups, job: JobRecord) -> None:
        self._batches = parts.batches(_READ_ROWS)
        self._job = job

    @cached_property
    def _first(self) -> pa.Table | None:
        return next(self._batches, None)

    @property
    def schema(self) -> pa.Schema:
        if self._first is not None:
            return self._first.schema.remove_metadata()
        return part_schema(read_stored(JobSpec, self._job.spec), [])

    def groups(self) -> Iterator[pa.Table]:
        schema = self.schema
        held: list[pa.Table] = []
        for batch in chain(() if self._first is None else (self._first,), self._batches):
            held.append(batch.replace_schema_metadata(None))
            if sum(len(each) for each in held) >= _GROUP_ROWS or sum(each.nbytes for each in held) >= _GROUP_BYTES:
                yield pa.concat_tables(held).cast(schema)
                held = []
        if held:
            yield pa.concat_tables(held).cast(schema)


Writer = Callable[[_Tables], Iterator[bytes]]


def parquet(tables: _Tables) -> Iterator[bytes]:
    """One Parquet file, compressed with zstd."""
    return _written(tables, partial(pq.ParquetWriter, compression="zstd"))


def arrow(tables: _Tables) -> Iterator[bytes]:
    """The streaming format of Arrow IPC."""
    return _written(tables, pa.ipc.new_stream)


def _written(tables: _Tables, writer_to: Callable[[pa.PythonFile, pa.Schema], Any]) -> Iterator[bytes]:
    pipe = _Pipe()
    writer = writer_to(pa.PythonFile(pipe, "w"), tables.schema)
    for table in tables.groups():
        writer.write_table(table)
        yield pipe.take()
    # Not in the face of an error: what then is there must not look whole.
    writer.close()
    yield pipe.take()


def json_lines(tables: _Tables) -> Iterator[bytes]:
    """A JSON object a line, as in the pages."""
    for table in tables.groups():
        for start in range(0, len(table), _READ_ROWS):
            rows = json_rows(table.slice(start, _READ_ROWS))
            yield "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
