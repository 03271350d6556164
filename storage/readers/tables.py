"""Tables in memory, of any library that hands them on as Arrow does, as a file that can be read several times."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from ..errors import InputError, StorageError
from .arrow import BATCH_ROWS, expect_storable, rows_at_a_time, without_views
from .readable import readable


class ArrowStream(Protocol):
    """The Arrow PyCapsule interface of tables: pandas', polars', pyarrow's, DuckDB's and others' have it."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object: ...


_STREAM = ArrowStream.__arrow_c_stream__.__name__


def is_table(rows: Any) -> bool:
    """Whether it can be read as batches of columns with types."""
    return hasattr(rows, _STREAM) or _is_dataset(rows)


def write_table(path: Path, rows: Any, name: str) -> None:
    """Write a table, which may be larger than memory, as Parquet. Raises InputError, StorageError."""
    reader = _reader(rows, name)
    schema = without_views(reader.schema.remove_metadata())
    for field in schema:
        expect_storable(name, field)
    try:
        with path.open("wb") as file, pq.ParquetWriter(file, schema) as writer:
            for table in _groups(reader, schema, name):
                writer.write_table(table)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror or error}") from error


def _is_dataset(rows: Any) -> bool:
    """Whether it is one of Hugging Face's `datasets`, which have a way of their own."""
    if not hasattr(rows, "with_format") or getattr(rows, "features", None) is None:
        return False
    # What its rows are transformed by would be left out.
    return getattr(rows, "format", {}).get("type") != "custom"


def _reader(rows: Any, name: str) -> pa.RecordBatchReader:
    if not hasattr(rows, _STREAM):
        tables = rows.with_format("arrow").iter(BATCH_ROWS)
        batches = (batch for table in tables for batch in table.to_batches())
        return pa.RecordBatchReader.from_batches(rows.features.arrow_schema, batches)
    if hasattr(rows, "to_frame"):
        raise InputError(f"input {name} is a column, of the type {type(rows).__name__}: give its to_frame()")
    try:
        return pa.RecordBatchReader.from_stream(rows)
    # pandas makes its columns Arrow's here, and raises what its libraries do.
    except (pa.ArrowException, TypeError, ValueError) as error:
        problem = " ".join("; ".join(map(str, error.args)).split())
        is_mixed = isinstance(error, pa.ArrowException) and hasattr(rows, "to_dict")
        hint = ': give it one type, or its rows as to_dict("records"), which may mix them' if is_mixed else ""
        raise InputError(f"input {name} cannot be read: {problem}{hint}") from error


def _groups(reader: pa.RecordBatchReader, schema: pa.Schema, name: str) -> Iterator[pa.Table]:
    """Of equal numbers of rows, fewer where they are large: in whatever batches they come, they make the same file."""
    held, num_rows = schema.empty_table(), 0
    with readable(name):
        for piece in _pieces(reader, schema):
            num_rows = num_rows or rows_at_a_time(1, piece.slice(0, 1).nbytes)
            held = pa.concat_tables([held, piece])
            while held.num_rows >= num_rows:
                yield held.slice(0, num_rows).combine_chunks()
                held = held.slice(num_rows)
        if held.num_rows:
            yield held.combine_chunks()


def _pieces(reader: pa.RecordBatchReader, schema: pa.Schema) -> Iterator[pa.Table]:
    for batch in reader:
        for start in range(0, batch.num_rows, BATCH_ROWS):
            table = pa.Table.from_batches([batch.slice(start, BATCH_ROWS)]).cast(schema)
            yield pa.table([_compact(column) for column in table.columns], schema=schema)


def _compact(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """With the categories that it has itself: Parquet would write all there are beside each group of rows."""
    if not pa.types.is_dictionary(column.type):
        return column
    return column.cast(column.type.value_type).dictionary_encode().cast(column.type)
