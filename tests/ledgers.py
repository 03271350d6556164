"""Ledgers in SQLite, which need not be migrated one by one."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from headrace.storage.ledger.ledger import Ledger


def new_ledger(file: Path) -> Ledger:
    """An empty one: a copy of one that was migrated once."""
    file.write_bytes(_migrated())
    return Ledger(f"sqlite:///{file}")


@cache
def _migrated() -> bytes:
    with TemporaryDirectory() as folder:
        file = Path(folder) / "ledger.db"
        ledger = Ledger(f"sqlite:///{file}")
        ledger.migrate()
        ledger.close()
        assert not Path(f"{file}-wal").exists(), "part of it is in another file"
        return file.read_bytes()
