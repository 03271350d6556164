"""What a connection is set to, and what its errors look like."""

import sqlite3
import time
from pathlib import Path

import pytest
from sqlalchemy import text

from headrace.storage.clock import now
from headrace.storage.database import Database
from headrace.storage.errors import LedgerError, LedgerUnavailable
from headrace.storage.ledger import Ledger


def test_sqlite_commits_are_durable_and_wait_for_each_other(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    Ledger(url).migrate()
    database = Database(url)
    with database.read() as connection:
        pragmas = {
            name: connection.scalar(text(f"PRAGMA {name}"))
            for name in ("journal_mode", "synchronous", "busy_timeout", "foreign_keys")
        }
    assert pragmas == {"journal_mode": "wal", "synchronous": 2, "busy_timeout": 30_000, "foreign_keys": 1}
    database.close()


def test_sqlite_writer_takes_the_lock_before_it_reads(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    database = Database(f"sqlite:///{path}")
    other = sqlite3.connect(path, timeout=0)
    with database.write(), pytest.raises(sqlite3.OperationalError, match="locked"):
        other.execute("BEGIN IMMEDIATE")
    with database.read():
        other.execute("BEGIN IMMEDIATE")
    other.close()
    database.close()


def test_exception_rolls_back(database_url: str) -> None:
    database = Database(database_url)
    with database.write() as connection:
        connection.execute(text("CREATE TABLE t (x INTEGER)"))
    with pytest.raises(ZeroDivisionError):
        _fail_in_the_middle(database)
    with database.read() as connection:
        assert connection.scalar(text("SELECT count(*) FROM t")) == 0
    with database.write() as connection:
        connection.execute(text("CREATE TABLE u (x INTEGER)"))
    database.close()


def _fail_in_the_middle(database: Database) -> None:
    with database.write() as connection:
        connection.execute(text("CREATE TABLE u (x INTEGER)"))
        connection.execute(text("INSERT INTO t VALUES (1)"))
        raise ZeroDivisionError


def test_clock_is_the_hosts(database_url: str) -> None:
    database = Database(database_url)
    with database.read() as connection:
        assert connection.scalar(now().select()) == pytest.approx(time.time(), abs=5)
    database.close()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ledger.db", "use sqlite:////path"),
        ("mysql://localhost/x", "'mysql' is not supported"),
        ("sqlite://", "give sqlite a file"),
        ("sqlite:///:memory:", "give sqlite a file"),
        ("postgresql+nope://localhost/x", "'postgresql\\+nope' is unknown"),
    ],
)
def test_unusable_url(url: str, message: str) -> None:
    with pytest.raises(LedgerError, match=message):
        Ledger(url)


def test_file_that_is_no_database(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    path.write_text("this is not a database, but long enough to be looked at " * 20)
    with pytest.raises(LedgerError, match="not a database"):
        Ledger(f"sqlite:///{path}").migrate()


def test_folder_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="missing does not exist: create it"):
        Ledger(f"sqlite:///{tmp_path / 'missing' / 'ledger.db'}").migrate()


def test_server_that_does_not_answer_hides_the_password(tmp_path: Path) -> None:
    ledger = Ledger(f"postgresql://me:secret@/headrace?host={tmp_path}")
    with pytest.raises(LedgerUnavailable) as caught:
        ledger.jobs()
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)
