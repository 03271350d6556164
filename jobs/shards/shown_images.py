"""The images in the prompts of a spooled shard's rows: files beside the rows, or in the input's own columns."""

from collections.abc import Sequence

import pyarrow as pa

from ...storage.rows.columns import carried_values, input_names
from ...storage.rows.spool import input_fields
from ..spec.prompt_template import asked_columns
from ..spec.row_images import carried_images
from ..spec.schemas import JobSpec


class ShownImages:
    """`table`: a spooled shard."""

    def __init__(self, table: pa.Table, spec: JobSpec) -> None:
        self._table, self._spec = table, spec
        carried = (field.name for field in input_fields(table.schema))
        names = input_names(carried, spec.schema_version, asked_columns(spec))
        # By what the input calls them.
        self._fields = {
            name: table.schema.field(carried) for carried, name in names.items() if name in ("messages", spec.image)
        }

    def of(self, place: int, beside: Sequence[bytes | None]) -> list[bytes]:
        """Those of the row at this place in the table. `beside`: as `prompt_images` has them."""
        files = [file for file in beside if file is not None]
        if len(files) == len(beside):
            return files
        columns = {name: (self._table[field.name].slice(place, 1), field) for name, field in self._fields.items()}
        carried = carried_images(self._spec, {name: carried_values(*column)[0] for name, column in columns.items()})
        return [own if file is None else file for file, own in zip(beside, carried, strict=True)]
