"""A page of a job's finished rows, read from its parts."""

from dataclasses import dataclass
from typing import Any

import pyarrow.compute as pc
import pyarrow.dataset as ds

from ...storage.ledger import Ledger
from ...storage.records import JobRecord
from ..planning.json_lines import json_rows
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
    return Page(list(json_rows(parts.to_table(filter=in_span).sort_by("row"))), len(numbers) > len(wanted))
