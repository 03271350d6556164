"""The file of an SQLite ledger, which somebody may remove or replace while it is used."""

from dataclasses import dataclass, field
from pathlib import Path

from .errors import LedgerUnavailable


@dataclass
class SqliteFile:
    """The one that all connections of a process are to.

    SQLite goes on with a file that has lost its name, and makes a new one where there is none. A process some of whose
    connections are older than that would have two ledgers: jobs come and go, and nobody works on what is in the other.
    Both methods raise LedgerUnavailable, as the file may be put back.
    """

    path: Path
    _known: tuple[int, int] | None = field(default=None, init=False)

    def expect_there(self) -> None:
        """For a new connection, which must not make a file in the place of the one that is known."""
        if self._known is not None and self._found() != self._known:
            raise self._lost()

    def expect_no_other(self) -> None:
        """For a connection that there is: it has the file as long as it lives, but others may be about to have another.

        The first file that is found is the one.
        """
        found = self._found()
        if self._known is None:
            self._known = found
        elif found not in (None, self._known):
            raise self._lost()

    def _found(self) -> tuple[int, int] | None:
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_dev, found.st_ino

    def _lost(self) -> LedgerUnavailable:
        return LedgerUnavailable(
            f"ledger {self.path} was removed or replaced while it was used: put the file back, or stop every headrace "
            "that uses it and start again"
        )
