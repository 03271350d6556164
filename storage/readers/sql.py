"""The rows of a SQL query."""

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, create_engine, text
from sqlalchemy.engine import URL, CursorResult, make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError

from ..database import reason_of, with_defaults, with_driver
from ..errors import Argument, InputError
from ..rows.columns import as_text
from .readable import refuse_duplicates
from .source import InputRow, InputSource

_FETCH_ROWS = 1024
_SQL, _QUERY = Argument("sql"), Argument("query")
# What SQLAlchemy takes for a parameter; a query of ours has none, and its texts and casts have colons.
_COLON = re.compile(r":(?=\w)")


class SqlQuery(InputSource):
    """What a query returns, in its order; read from the server a little at a time."""

    has_fixed_rows = False

    def __init__(self, url: str, query: str, limit: int | None) -> None:
        """Raises InputError when the database cannot be reached or refuses the query."""
        super().__init__("of the query", limit)
        self._query = query
        try:
            self._url = make_url(url)
            self._engine: Engine = create_engine(with_defaults(with_driver(self._url)))
        except (ArgumentError, NoSuchModuleError, ImportError) as error:
            raise InputError(_SQL, f" is not a database that can be opened: {reason_of(error)}") from error
        if _is_missing_file(self._url):
            # To connect would make an empty one.
            raise InputError(_SQL, f": there is no file {self._url.database!r}: check the path")
        with self._result() as result:
            names = list(result.keys())
        refuse_duplicates(self.name, names)
        self._columns = dict.fromkeys(names)

    def fingerprint(self) -> str:
        """Of the database and the query's text: what the query returns may change between two runs."""
        source = f"{self._url.set(password=None)}\n{self._query}"
        return hashlib.sha256(source.encode()).hexdigest()

    def _rows(self) -> Iterator[InputRow]:
        with self._result() as result:
            for number, row in enumerate(result):
                yield InputRow(number, dict(zip(self._columns, map(_plain, row), strict=True)))

    @contextmanager
    def _result(self) -> "Iterator[CursorResult[tuple[object, ...]]]":
        try:
            connecting = self._engine.connect()
        except SQLAlchemyError as error:
            raise InputError(_SQL, f" cannot be reached: {reason_of(error)}") from error
        try:
            with connecting as connection:
                if self._url.get_backend_name() == "sqlite":
                    # Its driver begins no transaction before a statement that changes the tables themselves.
                    connection.exec_driver_sql("BEGIN")
                streaming = connection.execution_options(stream_results=True, yield_per=_FETCH_ROWS)
                result = streaming.execute(text(_COLON.sub(r"\:", self._query)))
                if not result.returns_rows:
                    # Left without a commit, it has changed nothing.
                    raise InputError(_QUERY, " returns no rows: use a SELECT")
                yield result
        except SQLAlchemyError as error:
            raise InputError(_QUERY, f" failed: {reason_of(error)}") from error


def _plain(value: Any) -> Any:
    """What JSON has a way to write as it is; of times, decimals and bytes, also in lists, the text."""
    if value is None or isinstance(value, str | int | float):
        return value
    return json.loads(json.dumps(value, default=as_text))


def _is_missing_file(url: URL) -> bool:
    # Without a name, or in its own way of writing one, SQLite has no file that could be looked for.
    has_name = url.database and not url.database.startswith((":", "file:"))
    return url.get_backend_name() == "sqlite" and bool(has_name) and not Path(str(url.database)).is_file()
