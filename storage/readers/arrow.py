"""Inputs that are Arrow tables on disk: Parquet files, and data sets that Hugging Face's `datasets` saved."""

import hashlib
import json
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ..errors import InputError
from ..rows.columns import SchemaUnifier, carried_values, changed_type, python_values
from .location import Location
from .readable import readable, refuse_duplicates
from .source import InputRow, InputSource

BATCH_ROWS = 1024
_FIRST_ROWS = 16
# Of rows with images, which are hundreds of kilobytes, fewer are read at a time.
_BATCH_BYTES = 32 * 1024**2
_BYTES = (pa.binary(), pa.large_binary())


class ArrowSource(InputSource):
    """Files of record batches, one after the other. Their columns keep their types, or have one that both kinds fit."""

    def __init__(self, name: str, files: Sequence[Location], limit: int | None) -> None:
        """Raises InputError when the files' columns differ."""
        super().__init__(name, limit)
        self._files = files
        self._schema = self._read_schema(files[0])
        refuse_duplicates(name, self._schema.names)
        for file in files[1:]:
            self._schema = _merged(files[0], self._schema, file, self._read_schema(file))
        self._columns = dict.fromkeys(self._schema.names)

    @property
    def files(self) -> Sequence[Location]:
        return self._files

    def unifier(self) -> SchemaUnifier:
        return SchemaUnifier(exact=self._schema)

    def fingerprint(self) -> str:
        digests = [file.fingerprint() for file in self._files]
        return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()

    @abstractmethod
    def _read_schema(self, file: Location) -> pa.Schema: ...

    @abstractmethod
    def _batches(self, file: Location) -> Iterator[pa.RecordBatch]: ...

    def _rows(self) -> Iterator[InputRow]:
        row = 0
        for file in self._files:
            for batch in self._batches(file):
                columns = [_values(file, batch, field) for field in self._schema]
                for values in zip(*columns, strict=True):
                    yield InputRow(row, dict(zip(self._columns, values, strict=True)))
                    row += 1


class Parquet(ArrowSource):
    """Parquet files."""

    def _read_schema(self, file: Location) -> pa.Schema:
        with readable(file.name), file.open_raw() as raw, pq.ParquetFile(raw) as parquet:
            return without_views(parquet.schema_arrow)

    def _batches(self, file: Location) -> Iterator[pa.RecordBatch]:
        # Unbuffered: a file may be one row group, larger than memory.
        with file.open_raw() as raw, pq.ParquetFile(raw, pre_buffer=False) as parquet:
            for group in range(parquet.num_row_groups):
                with readable(f"{file.name}, row group {group},"):
                    yield from parquet.iter_batches(_rows_of_group_at_a_time(parquet, group), row_groups=[group])


class SavedDataset(ArrowSource):
    """A folder that `Dataset.save_to_disk` of Hugging Face's `datasets` wrote: streams of Arrow batches."""

    def __init__(self, folder: Location, limit: int | None) -> None:
        with readable(folder.name), folder.child("state.json").open() as file:
            state = json.load(file)
        files = [folder.child(entry["filename"]) for entry in state["_data_files"]]
        if not files:
            raise InputError(f"input {folder.name} has no rows: give it at least one")
        super().__init__(folder.name, files, limit)
        for field in self._schema:
            expect_storable(folder.name, field)

    def _read_schema(self, file: Location) -> pa.Schema:
        with readable(file.name), file.open_raw() as raw, pa.ipc.open_stream(raw) as stream:
            # What `datasets` notes about itself there is not ours to hand on.
            return without_views(stream.schema.remove_metadata())

    def _batches(self, file: Location) -> Iterator[pa.RecordBatch]:
        with file.open_raw() as raw, pa.ipc.open_stream(raw) as stream:
            for batch in stream:
                num_rows = rows_at_a_time(batch.num_rows, batch.nbytes)
                for start in range(0, batch.num_rows, num_rows):
                    yield batch.slice(start, num_rows)


def expect_storable(name: str, field: pa.Field) -> None:
    """Raises InputError for a type that Parquet has not, which is what rows go on in."""
    try:
        pq.ParquetWriter(pa.BufferOutputStream(), pa.schema([field])).close()
    except pa.ArrowException as error:
        raise InputError(
            f"input {name}: column {field.name!r} is {field.type}, which Parquet does not know: give it another "
            "type, or leave it out"
        ) from error


def without_views(schema: pa.Schema) -> pa.Schema:
    """With texts and bytes as plain ones where they are views, of which Arrow cannot take some."""
    fields = [field.with_type(changed_type(field.type, _without_view)) for field in schema]
    return pa.schema(fields, schema.metadata)


def _without_view(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_dictionary(kind):
        return pa.dictionary(kind.index_type, _without_view(kind.value_type), kind.ordered)
    return {pa.string_view(): pa.string(), pa.binary_view(): pa.binary()}.get(kind, kind)


def _rows_of_group_at_a_time(parquet: pq.ParquetFile, group: int) -> int:
    """By the size that the file notes, and by that of the first rows: a value that many rows share is noted once."""
    noted = parquet.metadata.row_group(group)
    first = next(parquet.iter_batches(_FIRST_ROWS, row_groups=[group]), None)
    sizes = [(noted.num_rows, noted.total_byte_size), *([] if first is None else [(first.num_rows, first.nbytes)])]
    return min(rows_at_a_time(*size) for size in sizes)


def rows_at_a_time(num_rows: int, num_bytes: int) -> int:
    """How many of so many rows, which take so many bytes together."""
    return max(1, min(BATCH_ROWS, _BATCH_BYTES * num_rows // max(1, num_bytes)))


def _values(file: Location, batch: pa.RecordBatch, field: pa.Field) -> list[Any]:
    """A column's values as one of `field`; those of a data set of ours as its input had them.

    Raises InputError where that would change one, such as an integer beyond 2⁵³ in a column of floats.
    """
    found, column = batch.schema.field(field.name), batch[field.name]
    if found.type != field.type:
        try:
            column = column.cast(field.type)
        except pa.ArrowInvalid as error:
            raise InputError(
                f"input {file.name}: column {field.name!r} has a value that {field.type}, its type in other files, "
                f"does not hold ({' '.join(str(error).split())}): give all files one type"
            ) from error
    try:
        return carried_values(column, field) if found.metadata == field.metadata else python_values(column)
    except OverflowError as error:
        raise InputError(
            f"input {file.name}: column {field.name!r} has a time before the year 1 or after 9999: make it a text, or "
            "leave it out"
        ) from error


def _merged(first: Location, schema: pa.Schema, other: Location, found: pa.Schema) -> pa.Schema:
    """The columns of both. Raises InputError when they have different ones, or no type holds the values of both."""
    for name in dict.fromkeys((*schema.names, *found.names)):
        before, now = (each.field(name).type if name in each.names else None for each in (schema, found))
        type_ = _common_type(before, now)
        if type_ is None:
            raise InputError(
                f"input {other.name}: column {name!r} is {now or 'missing'}, in {first.name} it is "
                f"{before or 'missing'}: give all files the same columns"
            )
        schema = schema.set(schema.get_field_index(name), schema.field(name).with_type(type_))
    return schema


def _common_type(one: pa.DataType | None, other: pa.DataType | None) -> pa.DataType | None:
    """pandas writes a column without a value as one of nulls, polars texts as large ones, and so on."""
    if one is None or other is None or one == other:
        return one and other
    schemas = [pa.schema([("", each.value_type if pa.types.is_dictionary(each) else each)]) for each in (one, other)]
    try:
        merged = pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    except pa.ArrowException:
        return None
    # Texts would become bytes.
    return None if merged in _BYTES and not {one, other} <= {*_BYTES, pa.null()} else merged
