"""A page of a job's finished rows, read from its parts."""

import math
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from ...storage.ledger import Ledger
from ...storage.records import JobRecord
from ..stored_results import read_parts


@dataclass(frozen=True)
class Page:
    """Rows as JSON objects, in the input's order; `has_more`: whether finished rows follow."""

    rows: list[dict[str, Any]]
    has_more: bool

    @property
    def last_row(self) -> int | None:
        return self.rows[-1]["row"] if self.rows else None


def read_page(ledger: Ledger, job: JobRecord, after_row: int | None, limit: int) -> Page:
    """The first `limit` finished rows after the row `after_row`, those committed so far while the job runs.

    Takes memory for the page and for the numbers of all rows that follow it.
    """
    return read_parts(ledger, job, lambda parts: _page_of(parts, after_row, limit))


def _page_of(parts: ds.Dataset, after_row: int | None, limit: int) -> Page:
    if not parts.files:
        return Page([], has_more=False)
    is_after = ds.field("row") > after_row if after_row is not None else None
    numbers = parts.to_table(columns=["row"], filter=is_after)["row"]
    wanted = numbers.take(pc.select_k_unstable(numbers, min(limit, len(numbers)), [("row", "ascending")]))
    if not len(wanted):
        return Page([], has_more=False)
    span = pc.min_max(wanted)
    in_span = (ds.field("row") >= span["min"]) & (ds.field("row") <= span["max"])
    return Page(json_rows(parts.to_table(filter=in_span).sort_by("row")), len(numbers) > len(wanted))


def json_rows(table: pa.Table) -> list[dict[str, Any]]:
    rows = table.to_pylist(maps_as_pydicts="lossy")
    return [{name: _json_value(value) for name, value in row.items()} for row in rows]


def _json_value(value: Any) -> Any:
    """What JSON can say: no NaN and no infinity; times, decimals and the like as text."""
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list):
        return [_json_value(item) for item in value]
    if isinstance(value, dict):
        return {str(name): _json_value(item) for name, item in value.items()}
    return str(value)
