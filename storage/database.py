"""Connections to SQLite and PostgreSQL, and transactions, which mean the same on both."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, InterfaceError, NoSuchModuleError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from .errors import LedgerError, LedgerUnavailable
from .sqlite_file import SqliteFile

# What somebody else does in a transaction of ours.
InTransaction = Callable[[Connection], None]
BUSY_TIMEOUT_SECONDS = 30
_IDLE_SECONDS = 10
# Of libpq, which these drivers hand them to. A host or a firewall between may vanish without a word: by the system's
# defaults who waits for an answer then waits for a quarter of an hour, or for two hours, and renews no lease meanwhile.
_POSTGRES_DEFAULTS = {
    # What psycopg takes from the database is bytes of those in SQL_ASCII, and fails by itself where one in LATIN1 lacks
    # a letter.
    "client_encoding": "utf8",
    "connect_timeout": "10",
    "keepalives_idle": "5",
    "keepalives_interval": "2",
    "keepalives_count": "3",
    "tcp_user_timeout": "10000",
}
_BEGIN = "headrace_sqlite_begin"


class Database:
    """An engine and its kinds of transaction; opens no connection before the first of them."""

    def __init__(self, url: str) -> None:
        self.url = _parse(url)
        self.engine = _create_engine(self.url)
        self._snapshot_engine = self.engine
        if not self.is_sqlite:
            self._snapshot_engine = self.engine.execution_options(isolation_level="REPEATABLE READ")
        self._writing_engine = self.engine.execution_options(**{_BEGIN: "BEGIN IMMEDIATE"})

    @property
    def name(self) -> str:
        """For people: without its password."""
        return f"ledger {self.url.render_as_string(hide_password=True)}"

    @property
    def is_sqlite(self) -> bool:
        return self.url.get_backend_name() == "sqlite"

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A transaction that commits at the end and rolls back on any exception.

        Raises LedgerUnavailable where another try may help, else LedgerError.
        """
        with self.translated_errors(), self._writing_engine.begin() as connection:
            yield connection

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A read-only transaction. On SQLite it is one snapshot, on PostgreSQL each statement is its own."""
        with self.translated_errors(), self.engine.begin() as connection:
            yield connection

    @contextmanager
    def snapshot(self) -> Iterator[Connection]:
        """A read-only transaction all of whose statements see the same moment."""
        with self.translated_errors(), self._snapshot_engine.begin() as connection:
            yield connection

    @contextmanager
    def translated_errors(self) -> Iterator[None]:
        """SQLAlchemy's errors as ours, in one line and without the password or the statement."""
        try:
            yield
        except SQLAlchemyError as error:
            is_lost = getattr(error, "connection_invalidated", False)
            # While the database hangs all connections are in use, and who waits for one is told so by the pool.
            may_pass = is_lost or isinstance(error, OperationalError | InterfaceError | PoolTimeout)
            kind = LedgerUnavailable if may_pass else LedgerError
            raise kind(f"{self.name}: {reason_of(error)}") from error

    def close(self) -> None:
        self.engine.dispose()


def reason_of(error: Exception) -> str:
    """The database's own words, in one line and without the statement."""
    return " ".join(str(getattr(error, "orig", None) or error).split())


def with_driver(url: URL) -> URL:
    """The same database; of PostgreSQL, by either of its names, with the driver that we install unless it names one."""
    return url.set(drivername="postgresql+psycopg") if url.drivername in ("postgresql", "postgres") else url


def with_defaults(url: URL) -> URL:
    """The same database; of PostgreSQL texts are told in UTF-8, whatever it keeps them in, and a connection whose other
    end has vanished fails after some ten seconds.

    What the URL says itself of the encoding, keepalives and timeouts stays.
    """
    if url.get_backend_name() != "postgresql" or url.get_driver_name() not in ("psycopg", "psycopg2"):
        return url
    return url.set(query={**_POSTGRES_DEFAULTS, **url.query})


def _parse(text: str) -> URL:
    try:
        url = make_url(text)
    except (ArgumentError, ValueError) as error:
        raise LedgerError(
            "the database URL cannot be read: use sqlite:////path/to/ledger.db or postgresql://user@host/name"
        ) from error
    url = with_driver(url)
    if url.get_backend_name() not in ("sqlite", "postgresql"):
        raise LedgerError(f"database {url.get_backend_name()!r} is not supported: use sqlite or postgresql")
    if url.get_backend_name() == "sqlite" and url.database in (None, "", ":memory:"):
        raise LedgerError("the ledger must outlive the process: give sqlite a file, sqlite:////path/to/ledger.db")
    return url


def _create_engine(url: URL) -> Engine:
    if url.get_backend_name() == "sqlite":
        return _sqlite_engine(url)
    try:
        # A server that was restarted is noticed before a statement is tried on a dead connection.
        engine = create_engine(with_defaults(url), pool_pre_ping=True)
    except ModuleNotFoundError as error:
        raise LedgerError(f"{error.name} is missing: install headrace with its postgres extra") from error
    except NoSuchModuleError as error:
        raise LedgerError(f"database driver {url.drivername!r} is unknown: use postgresql://") from error
    event.listen(engine, "connect", _configure_postgres_connection)
    return engine


def _configure_postgres_connection(connection: Any, record: object) -> None:
    # A process that stands still in mid transaction would keep what it has locked from all others: its shard could
    # neither be put back nor taken. Said here, as poolers refuse such an option at the start of a connection.
    connection.execute(f"SET idle_in_transaction_session_timeout = '{_IDLE_SECONDS}s'")
    connection.commit()


def _sqlite_engine(url: URL) -> Engine:
    engine = create_engine(url, connect_args={"timeout": BUSY_TIMEOUT_SECONDS})
    file = SqliteFile(Path(str(url.database)))
    event.listen(engine, "do_connect", lambda *_: file.expect_there())
    event.listen(engine, "connect", _configure_sqlite_connection)
    event.listen(engine, "begin", lambda _: file.expect_no_other())
    event.listen(engine, "begin", _begin_sqlite_transaction)
    return engine


def _configure_sqlite_connection(connection: Any, record: object) -> None:
    # The sqlite3 module would begin late, and never before DDL; with None it leaves BEGIN to us.
    connection.isolation_level = None
    # In WAL mode NORMAL may forget the last commits when power fails. A part is published right after its
    # commit, so a forgotten commit would be a published file whose rows are generated a second time.
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA foreign_keys = ON")


def _begin_sqlite_transaction(connection: Connection) -> None:
    # A transaction that reads first and then writes fails at once if another wrote between, whatever the
    # busy timeout. Writers therefore take the lock at the start, where they wait for it.
    connection.exec_driver_sql(connection.get_execution_options().get(_BEGIN, "BEGIN"))
