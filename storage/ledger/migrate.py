"""Bring a database to the current schema, however many processes ask for it at once."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import Connection, text
from sqlalchemy.exc import OperationalError, ProgrammingError

from ..database import Database
from ..errors import LedgerError
from .tables import SCHEMA_REVISION, metadata

# Any number that no other user of the same PostgreSQL database is likely to lock.
_ADVISORY_LOCK = 0x68656164


def migrate(database: Database) -> None:
    """Upgrade to the newest revision. Raises LedgerError when the database is newer than this headrace."""
    _check_folder(database)
    if _revision(database) == SCHEMA_REVISION:
        return
    with _only_migrator(database), database.write() as connection:
        if not database.is_sqlite:
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _ADVISORY_LOCK})
        _upgrade(connection)


def _check_folder(database: Database) -> None:
    # SQLite would only say that it cannot open the file.
    if database.is_sqlite and not (folder := Path(str(database.url.database)).parent).is_dir():
        raise LedgerError(f"ledger folder {folder} does not exist: create it or change the database URL")


def _revision(database: Database) -> str | None:
    with database.translated_errors():
        try:
            with database.engine.connect() as connection:
                revision: str | None = connection.scalar(text("SELECT version_num FROM alembic_version"))
                return revision
        except (OperationalError, ProgrammingError) as error:
            # SQLite and PostgreSQL, in this order, in a database without tables.
            if "no such table" in str(error.orig) or "does not exist" in str(error.orig):
                return None
            raise


@contextmanager
def _only_migrator(database: Database) -> Iterator[None]:
    if not database.is_sqlite:
        yield
        return
    with _file_lock(Path(f"{database.url.database}.migrate.lock")):
        # The mode is kept in the file. The switch fails at once if another connection is busy, so it is
        # made here, under the lock, and not on every connect.
        with database.translated_errors(), database.engine.connect() as connection:
            driver = connection.connection.driver_connection
            assert driver is not None
            driver.execute("PRAGMA journal_mode = WAL")
        yield


@contextmanager
def _file_lock(path: Path) -> Iterator[None]:
    try:
        file = path.open("a")
    except OSError as error:
        raise LedgerError(f"cannot create the ledger in {path.parent}: {error.strerror}") from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _upgrade(connection: Connection) -> None:
    # Alembic takes a fifth of a second to import, and most processes find nothing to do.
    from alembic import command
    from alembic.config import Config
    from alembic.util import CommandError

    config = Config(attributes={"connection": connection, "target_metadata": metadata})
    config.set_main_option("script_location", f"{__package__}:migrations")
    try:
        command.upgrade(config, "head")
    except CommandError as error:
        raise LedgerError(f"the ledger belongs to a newer headrace ({error}): upgrade this one") from error
