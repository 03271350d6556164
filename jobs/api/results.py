"""A page of a job's finished rows, read from its parts."""

from dataclasses import dataclass
from typing import Any

from ...storage.ledger import Ledger
from ...storage.records import JobRecord
from ..results.json_lines import json_rows
from ..results.row_index import RowIndex


@dataclass(frozen=True)
class Page:
    """Rows as JSON objects, in the input's order; `has_more`: whether finished rows follow."""

    rows: list[dict[str, Any]]
    has_more: bool

    @property
    def last_row(self) -> int | None:
        return self.rows[-1]["row"] if self.rows else None


def read_page(ledger: Ledger, index: RowIndex, job: JobRecord, after_row: int | None, limit: int) -> Page:
    """The first `limit` finished rows after the row `after_row`, those committed so far while the job runs."""
    found = index.first_rows(ledger, job, limit, after_row)
    return Page(list(json_rows(found.table)), found.has_more)
