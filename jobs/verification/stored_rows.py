"""Rows of a data set as the input that they were made of."""

import hashlib
import json
from collections.abc import Container, Iterator
from typing import Any

import pyarrow as pa

from ...storage.readers import InputRow, InputSource
from ...storage.rows.columns import SCHEMA_VERSION, SchemaUnifier, carried_values, input_names


class StoredRows(InputSource):
    """Rows under the numbers they have, which is what their seeds are made of, with the input's columns.

    `schema_version`: which columns of the table are not the input's. `ids_are_images`: each row's `custom_id` names
    its images, so that one that was no text is needed as it was. `asked`: as `input_names` has it.
    """

    def __init__(
        self,
        name: str,
        table: pa.Table,
        schema_version: int = SCHEMA_VERSION,
        ids_are_images: bool = False,
        asked: Container[str] = (),
    ) -> None:
        super().__init__(name, None)
        self._ids_are_images = ids_are_images
        self._table = table.combine_chunks()
        names = input_names(table.schema.names, schema_version, asked)
        fields = [table.schema.field(name) for name in names]
        self._fields = {names[field.name]: field for field in fields}
        self._columns = dict.fromkeys(("custom_id", *self._fields))

    def unifier(self) -> SchemaUnifier:
        fields = (field.with_name(name) for name, field in self._fields.items())
        return SchemaUnifier(exact=pa.schema([pa.field("custom_id", pa.string()), *fields]))

    def fingerprint(self) -> str:
        return hashlib.sha256(f"{self.name}\n{self._table['row'].to_pylist()}".encode()).hexdigest()

    def _rows(self) -> Iterator[InputRow]:
        carried = [carried_values(self._table[field.name], field) for field in self._fields.values()]
        custom_ids = self._table["custom_id"].to_pylist()
        columns = ([_as_given(each) for each in custom_ids] if self._ids_are_images else custom_ids, *carried)
        for row, *values in zip(self._table["row"].to_pylist(), *columns, strict=True):
            yield InputRow(row, dict(zip(self._columns, values, strict=True)))


def _as_given(custom_id: str) -> Any:
    """A list or an object was written down as JSON, see `custom_id_of`."""
    try:
        given = json.loads(custom_id)
    except ValueError:
        return custom_id
    return given if isinstance(given, list | dict) else custom_id
