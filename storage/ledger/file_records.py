"""Which files clients have uploaded or may fetch. The bytes are elsewhere, under the id."""

from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import Connection, Select, delete, insert, or_, select

from ..database import Database
from ..errors import UnknownFile
from .clock import now
from .pages import by_age, follows
from .tables import files


@dataclass(frozen=True)
class NewFile:
    """A file whose bytes are in place. It expires `expires_after_seconds` after it is recorded, None: never."""

    id: str
    tenant: str
    purpose: str
    filename: str
    num_bytes: int
    sha256: str
    expires_after_seconds: float | None


@dataclass(frozen=True)
class FileRecord:
    """Times are seconds since the epoch. `filename` is what the client called it."""

    id: str
    tenant: str
    purpose: str
    filename: str
    num_bytes: int
    sha256: str
    created_at: float
    expires_at: float | None


@dataclass(frozen=True)
class FileRecords:
    """The table of files; every method is one transaction, and raises what `Ledger`'s methods raise."""

    database: Database

    def add(self, file: NewFile) -> FileRecord:
        with self.database.write() as connection:
            return insert_file(connection, file)

    def get(self, tenant: str, file_id: str) -> FileRecord:
        """Raises UnknownFile, also for another tenant's and for one that has expired."""
        of_tenant = _visible(tenant).where(files.c.id == file_id)
        with self.database.read() as connection:
            row = connection.execute(of_tenant).one_or_none()
        if row is None:
            raise _unknown(file_id)
        return FileRecord(**row._mapping)

    def page(
        self, tenant: str, limit: int, after: str | None = None, purpose: str | None = None, newest_first: bool = True
    ) -> list[FileRecord]:
        """The first `limit` files after the file `after`. Raises UnknownFile when there is no such file."""
        wanted = _visible(tenant)
        if purpose is not None:
            wanted = wanted.where(files.c.purpose == purpose)
        if after is not None:
            wanted = wanted.where(follows(files, self.get(tenant, after), newest_first))
        with self.database.read() as connection:
            rows = connection.execute(wanted.order_by(*by_age(files, newest_first)).limit(limit))
            return [FileRecord(**row._mapping) for row in rows]

    def delete(self, tenant: str, file_id: str) -> None:
        """Raises UnknownFile."""
        gone = delete(files).where(files.c.tenant == tenant, files.c.id == file_id)
        with self.database.write() as connection:
            if connection.execute(gone).rowcount == 0:
                raise _unknown(file_id)

    def delete_expired(self) -> list[str]:
        """Forget the files whose time is over; returns their ids."""
        with self.database.read() as connection:
            expired = list(connection.scalars(select(files.c.id).where(files.c.expires_at <= now())))
        if expired:
            with self.database.write() as connection:
                connection.execute(delete(files).where(files.c.id.in_(expired), files.c.expires_at <= now()))
        return expired

    def known(self, file_ids: Collection[str]) -> set[str]:
        """Those of the ids that are recorded."""
        with self.database.read() as connection:
            return set(connection.scalars(select(files.c.id).where(files.c.id.in_(file_ids))))


def insert_file(connection: Connection, file: NewFile) -> FileRecord:
    """Record a file in a transaction that is under way."""
    values = asdict(file)
    seconds = values.pop("expires_after_seconds")
    added = insert(files).values(**values, created_at=now(), expires_at=None if seconds is None else now() + seconds)
    return FileRecord(**connection.execute(added.returning(files)).one()._mapping)


def _visible(tenant: str) -> Select[Any]:
    is_current = or_(files.c.expires_at.is_(None), files.c.expires_at > now())
    return select(files).where(files.c.tenant == tenant, is_current)


def _unknown(file_id: str) -> UnknownFile:
    return UnknownFile(f"file {file_id!r} does not exist")
