"""The rows of a SQL query."""

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import Engine, create_engine, text
from sqlalchemy.engine import URL, CursorResult, make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError

from ..errors import InputError
from .source import InputRow, InputSource, refuse_duplicates

_FETCH_ROWS = 1024
# What SQLAlchemy takes for a parameter; a query of ours has none, and its texts and casts have colons.
_COLON = re.compile(r":(?=\w)")


class SqlQuery(InputSource):
    """What a query returns, in its order; read from the server a little at a time."""

    has_fixed_rows = False

    def __init__(self, url: str, query: str, limit: int | None) -> None:
        """Raises InputError when the database cannot be reached or refuses the query."""
        super().__init__("--query", limit)
        self._query = query
        try:
            self._engine: Engine = create_engine(url)
        except (ArgumentError, NoSuchModuleError, ImportError) as error:
            raise InputError(f"--sql is not a database that can be opened: {_one_line(error)}") from error
        self._url = make_url(url)
        if _is_missing_file(self._url):
            # To connect would make an empty one.
            raise InputError(f"--sql: there is no file {self._url.database!r}: check the path")
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
                yield InputRow(number, dict(zip(self._columns, row, strict=True)))

    @contextmanager
    def _result(self) -> "Iterator[CursorResult[tuple[object, ...]]]":
        try:
            connecting = self._engine.connect()
        except SQLAlchemyError as error:
            raise InputError(f"--sql cannot be reached: {_reason(error)}") from error
        try:
            with connecting as connection:
                streaming = connection.execution_options(stream_results=True, yield_per=_FETCH_ROWS)
                result = streaming.execute(text(_COLON.sub(r"\:", self._query)))
                if not result.returns_rows:
                    # Left without a commit, it has changed nothing.
                    raise InputError("--query returns no rows: use a SELECT")
                yield result
        except SQLAlchemyError as error:
            raise InputError(f"--query failed: {_reason(error)}") from error


def _reason(error: SQLAlchemyError) -> str:
    """The database's own words."""
    return _one_line(getattr(error, "orig", None) or error)


def _one_line(error: object) -> str:
    return " ".join(str(error).split())


def _is_missing_file(url: URL) -> bool:
    # Without a name, or in its own way of writing one, SQLite has no file that could be looked for.
    has_name = url.database and not url.database.startswith((":", "file:"))
    return url.get_backend_name() == "sqlite" and bool(has_name) and not Path(str(url.database)).is_file()
