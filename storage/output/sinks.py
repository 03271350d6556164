"""A job's rows in a SQL table of the user's: typed columns, each row once.

A table in the ledger's own database gets rows in the transaction that commits them. In another database a row is
written before the ledger learns that it is done, so that none is missing. What an attempt has written that then fails
to commit is written over by the next: rows are keyed by job and row, and an older attempt never overwrites a newer
one's.
"""

import datetime as dt
import json
import os
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Connection,
    Date,
    DateTime,
    Double,
    Engine,
    LargeBinary,
    MetaData,
    Numeric,
    PrimaryKeyConstraint,
    Table,
    Text,
    create_engine,
    delete,
    event,
    inspect,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import (
    ArgumentError,
    InterfaceError,
    NoSuchModuleError,
    OperationalError,
    SQLAlchemyError,
)
from sqlalchemy.pool import NullPool
from sqlalchemy.types import TypeEngine

from ..database import reason_of, with_defaults, with_driver
from ..errors import Argument, SinkError, SinkUnavailable
from ..rows.columns import in_microseconds, json_value, plain_rows
from .parts import ADDED_NAMES

DEFAULT_TABLE = "headrace_results"
_KEY = ("job_id", "row")
# Somebody who works on the table itself may lock it for hours: it is tried again, and said why.
_LOCK_SECONDS = 10.0
_OWN_COLUMNS = ("job_id", "attempt_id")
_INSERTS: dict[str, Callable[[Table], postgresql.Insert | sqlite.Insert]] = {
    "sqlite": sqlite.insert,
    "postgresql": postgresql.insert,
}
_SINK, _SINK_TABLE = Argument("sink"), Argument("sink_table")
_POSTGRES_NAME_BYTES = 63
# PostgreSQL's code for a table that is not there.
_UNDEFINED_TABLE = "42P01"
# As many values as a statement of either database takes, and more.
_ROWS_AT_A_TIME = 1000
# Of what keeps a connection from being made neither libpq nor SQLite's driver has a code for all cases: their words are
# all there is. What is none of these may pass.
_WRONG_URL = re.compile(
    r"authentication failed|does not exist|no password supplied|no pg_hba\.conf entry|not permitted to log in"
    r"|permission denied for database|no such (user|database)|invalid \w+ value|unable to open database file"
    rf"|failed to resolve host .*\[Errno {socket.EAI_NONAME}\]"
)
_PROBE: dict[str, Any] = {"job_id": "", "row": 0, "attempt_id": 0}


@dataclass(frozen=True)
class SinkSpec:
    """Where a job's rows go: a database and a table in it, in PostgreSQL also `schema.table`."""

    url: str = field(repr=False)
    table: str = DEFAULT_TABLE

    @classmethod
    def parse(cls, url: str, table: str = DEFAULT_TABLE) -> Self:
        """Check a URL; a file of SQLite gets its absolute path. Raises SinkError."""
        if not table:
            raise SinkError(_SINK_TABLE, " is empty: name a table")
        try:
            parsed = with_driver(make_url(url))
        except (ArgumentError, ValueError) as error:
            raise SinkError(_SINK, " must be postgresql://user@host/name or sqlite:///path/to/file.db") from error
        name = parsed.get_backend_name()
        if name not in _INSERTS:
            raise SinkError(_SINK, f" cannot be {name}: use postgresql:// or sqlite://")
        if name == "sqlite":
            if parsed.database in (None, "", ":memory:"):
                raise SinkError(_SINK, " needs a file for sqlite: sqlite:///path/to/file.db")
            parsed = parsed.set(database=str(Path(str(parsed.database)).absolute()))
        return cls(parsed.render_as_string(hide_password=False), table)

    @classmethod
    def of(cls, values: Mapping[str, str] | None) -> Self | None:
        """What `as_dict` has made, or None of None."""
        return None if values is None else cls(**values)

    def is_in(self, database: URL) -> bool:
        """Whether the table is in this database, and its user the same."""
        return _normal(make_url(self.url)) == _normal(database)

    @property
    def options(self) -> set[str]:
        """The names of what the URL says behind its question mark."""
        return set(make_url(self.url).query)

    def as_dict(self) -> dict[str, str]:
        return asdict(self)

    def __str__(self) -> str:
        """Without the password."""
        return f"{make_url(self.url).render_as_string(hide_password=True)}, table {self.table}"


class SqlSink:
    """Writes rows with the columns of `schema`, which is a part's. Opens a connection for a call that is given none.

    Raises SinkUnavailable where another try may help, else SinkError.
    """

    def __init__(self, spec: SinkSpec, schema: pa.Schema) -> None:
        self._spec = spec
        self._stored = _stored_names(schema.names, make_url(spec.url).get_backend_name())
        columns = self._stored.items()
        schema_name, _, table_name = spec.table.rpartition(".")
        self._table = Table(
            table_name,
            MetaData(schema=schema_name or None),
            Column("job_id", Text, nullable=False),
            Column("attempt_id", BigInteger, nullable=False),
            *(Column(name, _sql_type(schema.field(given).type), nullable=name not in _KEY) for given, name in columns),
            PrimaryKeyConstraint(*_KEY),
        )

    def prepare(self) -> None:
        """Create the table, or make sure that the one there is can be written to; leaves no row.

        One of before there were certain columns gets them.
        """
        before = self._column_names()
        try:
            self._prepare()
        except SinkError:
            if self._column_names() == before:
                raise
            # Another job has created the table this moment, or added what we were about to add.
            self._prepare()

    def _prepare(self) -> None:
        with _connected(self._spec) as connection, connection.begin():
            if inspect(connection).has_table(self._table.name, self._table.schema):
                self._add_columns(connection, self._refuse_other_columns(connection))
            else:
                self._table.create(connection)
            probe = connection.begin_nested()
            # Where this fails all is undone: SQLite has done so by then if its disk is full, and knows no savepoint.
            self._upsert(connection, [_PROBE | dict.fromkeys(self._answer_columns)])
            probe.rollback()

    def _column_names(self) -> set[str] | None:
        """Those that the table has; None where there is none."""
        with _connected(self._spec) as connection:
            there, place = inspect(connection), (self._table.name, self._table.schema)
            return {column["name"] for column in there.get_columns(*place)} if there.has_table(*place) else None

    def upsert(self, job_id: str, attempt_id: int, part: pa.Table, connection: Connection | None = None) -> None:
        """Write a part's rows, over those that this or an earlier attempt has written.

        With a connection to the sink's database, in its transaction.
        """
        both = {"job_id": job_id, "attempt_id": attempt_id}
        rows = [
            both | {self._stored[name]: _plain(value) for name, value in row.items()}
            for row in plain_rows(in_microseconds(part))
        ]
        if connection is not None:
            with _translated_errors(self._spec), _lock_timeout(connection):
                self._upsert(connection, rows)
            return
        with _connected(self._spec) as own, own.begin():
            self._upsert(own, rows)

    def remove(self, job_id: str, attempt_id: int, rows: Sequence[int]) -> None:
        """Take back rows that this attempt has written; what a later one has written over them stays."""
        columns = self._table.c
        own = delete(self._table).where(columns.job_id == job_id, columns.attempt_id == attempt_id)
        with _connected(self._spec) as connection, connection.begin():
            for start in range(0, len(rows), _ROWS_AT_A_TIME):
                connection.execute(own.where(columns.row.in_(rows[start : start + _ROWS_AT_A_TIME])))

    @property
    def _answer_columns(self) -> list[str]:
        return [column.name for column in self._table.columns if column.name not in _PROBE]

    def _upsert(self, connection: Connection, rows: list[dict[str, Any]]) -> None:
        insert = _INSERTS[connection.dialect.name](self._table)
        changed = {column.name: insert.excluded[column.name] for column in self._table.columns}
        is_newer = self._table.c.attempt_id <= insert.excluded.attempt_id
        connection.execute(insert.on_conflict_do_update(index_elements=_KEY, set_=changed, where=is_newer), rows)

    def _add_columns(self, connection: Connection, names: Iterable[str]) -> None:
        place = connection.dialect.identifier_preparer.format_table(self._table)
        for name in names:
            kind = self._table.c[name].type.compile(connection.dialect)
            connection.exec_driver_sql(f"ALTER TABLE {place} ADD COLUMN {name} {kind}")

    def _refuse_other_columns(self, connection: Connection) -> list[str]:
        """Returns those that are missing but may be added."""
        there = inspect(connection)
        place = (self._table.name, self._table.schema)
        types = {column["name"]: column["type"] for column in there.get_columns(*place)}
        wanted = {column.name: column.type for column in self._table.columns}
        if missing := [name for name in wanted if name not in types and name not in ADDED_NAMES]:
            raise SinkError(f"sink {self._spec} has no column {missing[0]!r}: choose another ", _SINK_TABLE)
        if foreign := [name for name in types if name not in wanted]:
            problem = f"has a column {foreign[0]!r} of another kind of job: choose another "
            raise SinkError(f"sink {self._spec} {problem}", _SINK_TABLE)
        later = [name for name in wanted if name not in types]
        for name, kind in wanted.items():
            if name not in later and _python_type(kind) is not _python_type(types[name]):
                problem = f"has {types[name]} in column {name!r} where {kind} is written: choose another "
                raise SinkError(f"sink {self._spec} {problem}", _SINK_TABLE)
        if set(there.get_pk_constraint(*place)["constrained_columns"]) != set(_KEY):
            raise SinkError(f"sink {self._spec} is not keyed by job_id and row: choose another ", _SINK_TABLE)
        return later


def check_reachable(spec: SinkSpec) -> None:
    """Raises SinkUnavailable where the database may answer later, SinkError where its URL has to be another."""
    try:
        with _connected(spec):
            pass
    except SinkUnavailable as error:
        if _WRONG_URL.search(str(error)):
            raise SinkError(str(error)) from error
        raise


@contextmanager
def _connected(spec: SinkSpec) -> Iterator[Connection]:
    with _translated_errors(spec), _engine(spec.url).connect() as connection:
        yield connection


@contextmanager
def _translated_errors(spec: SinkSpec) -> Iterator[None]:
    try:
        yield
    except SQLAlchemyError as error:
        # SQLite says of a table that is gone that it cannot be operated on.
        is_gone = getattr(getattr(error, "orig", None), "sqlstate", None) == _UNDEFINED_TABLE
        may_pass = is_gone or isinstance(error, OperationalError | InterfaceError)
        kind = SinkUnavailable if may_pass else SinkError
        raise kind(f"sink {spec}: {reason_of(error)}") from error


def _normal(url: URL) -> URL:
    """The same for two ways to write an address; of two names for one host it knows nothing."""
    if url.get_backend_name() == "sqlite":
        return URL.create("sqlite", database=os.path.realpath(str(url.database)))
    return url.set(drivername="postgresql", port=url.port or 5432)


@contextmanager
def _lock_timeout(connection: Connection) -> Iterator[None]:
    """Of what is done within, in the midst of a transaction. SQLite has a timeout of its own."""
    if connection.dialect.name != "postgresql":
        yield
        return
    connection.exec_driver_sql(f"SET LOCAL lock_timeout = {_lock_milliseconds()}")
    yield
    connection.exec_driver_sql("SET LOCAL lock_timeout = DEFAULT")


def _set_lock_timeout(connection: Any, record: object) -> None:
    # Whatever driver the URL names.
    cursor = connection.cursor()
    cursor.execute(f"SET lock_timeout = {_lock_milliseconds()}")
    cursor.close()
    connection.commit()


def _lock_milliseconds() -> int:
    return round(_LOCK_SECONDS * 1000)


def _engine(url: str) -> Engine:
    is_postgres = url.startswith("postgresql")
    options = {} if is_postgres else {"timeout": 30}
    try:
        engine = create_engine(with_defaults(make_url(url)), poolclass=NullPool, connect_args=options)
        if is_postgres:
            event.listen(engine, "connect", _set_lock_timeout)
        return engine
    except ModuleNotFoundError as error:
        raise SinkError(f"{error.name} is missing: install headrace with its postgres extra") from error
    except NoSuchModuleError as error:
        raise SinkError(_SINK, f" names an unknown database driver: {error}") from error


def _stored_names(names: Iterable[str], backend: str) -> dict[str, str]:
    """What the table calls each column. Raises SinkError where no table could have them all."""
    stored: dict[str, str] = {}
    # By what the database knows a column.
    known: dict[bytes, str] = {}
    for name in names:
        if name.casefold() in _OWN_COLUMNS:
            raise SinkError(f"the input's column {name!r} is one that the sink has itself: rename it")
        if not name or "\0" in name:
            raise SinkError(f"the input has a column {name!r}, which is no name for one of a sink: rename it")
        # PostgreSQL cuts longer ones off, between two characters.
        stored[name] = name.encode()[:_POSTGRES_NAME_BYTES].decode(errors="ignore") if backend != "sqlite" else name
        key = name.encode().lower() if backend == "sqlite" else stored[name].encode()
        if (other := known.setdefault(key, name)) != name:
            raise SinkError(f"the input's columns {other!r} and {name!r} are one to the sink: rename one of them")
    return stored


_TYPES: tuple[tuple[Callable[[pa.DataType], bool], type[TypeEngine[Any]]], ...] = (
    (pa.types.is_boolean, Boolean),
    (pa.types.is_uint64, Numeric),
    (pa.types.is_integer, BigInteger),
    (pa.types.is_floating, Double),
    (pa.types.is_decimal, Numeric),
    (pa.types.is_date, Date),
    (pa.types.is_binary, LargeBinary),
    (pa.types.is_large_binary, LargeBinary),
    (pa.types.is_fixed_size_binary, LargeBinary),
)
# `bool` is an `int`, and `datetime` a `date`.
_SQL_VALUES = (int, float, Decimal, dt.date, bytes)


def _sql_type(kind: pa.DataType) -> TypeEngine[Any]:
    """The column for an Arrow type; what SQL has no type for, such as a duration, is text."""
    if pa.types.is_timestamp(kind):
        return DateTime(timezone=kind.tz is not None)
    if pa.types.is_nested(kind):
        return JSON(none_as_null=True)
    return next((sql_type() for is_kind, sql_type in _TYPES if is_kind(kind)), Text())


def _python_type(kind: TypeEngine[Any]) -> type:
    # PostgreSQL's JSONB and others say nothing of theirs.
    return dict if isinstance(kind, JSON) else kind.python_type


def _plain(value: Any) -> Any:
    """What both databases take: no NUL in texts; nested values as JSON has them, what they have no type for as text."""
    if isinstance(value, str):
        return value.replace("\0", "\ufffd")
    if isinstance(value, dict | list):
        return json.loads(json.dumps(json_value(value)).replace("\\u0000", "\\ufffd"))
    return value if value is None or isinstance(value, _SQL_VALUES) else str(value)
