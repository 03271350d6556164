"""Where a disturbed job's ledger is, and how it is taken away."""

import sqlite3
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ..postgres import PostgresServer


class LedgerDatabase(Protocol):
    """`url`: for HEADRACE_DATABASE_URL. While it is `away`, nothing can be written there."""

    @property
    def url(self) -> str: ...

    def away(self) -> AbstractContextManager[None]: ...


@dataclass(frozen=True)
class SqliteFile:
    path: Path

    @property
    def url(self) -> str:
        return f"sqlite:///{self.path}"

    @contextmanager
    def away(self) -> Iterator[None]:
        connection = sqlite3.connect(self.path, timeout=20, isolation_level=None)
        try:
            connection.execute("BEGIN EXCLUSIVE")
            yield
            connection.execute("ROLLBACK")
        finally:
            connection.close()


@dataclass(frozen=True)
class PostgresDatabase:
    """It goes away with its server, which drops all connections."""

    server: PostgresServer
    url: str

    def away(self) -> AbstractContextManager[None]:
        return self.server.away()
