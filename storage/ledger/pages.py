"""The rows of a table by their age, some at a time: what a page of jobs, of files or of batches is."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Table, and_, or_


def by_age(table: Table, newest_first: bool) -> Sequence[ColumnElement[Any]]:
    columns = (table.c.created_at, table.c.id)
    return [column.desc() if newest_first else column for column in columns]


def follows(table: Table, record: Any, newest_first: bool) -> ColumnElement[bool]:
    """Whether a row of `table` comes after the record in the order of `by_age`."""
    created_at, row_id = table.c.created_at, table.c.id
    if newest_first:
        return or_(created_at < record.created_at, and_(created_at == record.created_at, row_id < record.id))
    return or_(created_at > record.created_at, and_(created_at == record.created_at, row_id > record.id))
