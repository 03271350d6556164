"""What a connection is set to, and what its errors look like."""

import sqlite3
import time
from collections import deque
from contextlib import ExitStack
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import select, text

from headrace.storage.database import Database
from headrace.storage.errors import LedgerError, LedgerUnavailable
from headrace.storage.ledger.clock import now
from headrace.storage.ledger.ledger import Ledger
from headrace.storage.ledger.records import NewJob, NewShard
from headrace.storage.ledger.tables import shards

from ..ledgers import new_ledger
from ..postgres import new_database


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


def test_a_process_has_one_sqlite_file_though_it_is_removed_and_replaced(tmp_path: Path) -> None:
    path, told = tmp_path / "ledger.db", "removed or replaced while it was used: put the file back, or stop"
    ledger = new_ledger(path)
    assert ledger.jobs() == []
    away = path.rename(tmp_path / "away")
    # The connection that there is has the file; a second one would make another.
    with ledger.database.read(), pytest.raises(LedgerUnavailable, match=told):
        ledger.jobs()
    assert ledger.jobs() == []
    assert not path.exists()
    new_ledger(path).close()
    with pytest.raises(LedgerUnavailable, match=told):
        ledger.jobs()
    away.replace(path)
    assert ledger.jobs() == []
    ledger.close()


def test_texts_are_utf8_in_a_postgres_database_that_knows_no_encoding(postgres_server: str) -> None:
    with new_database(postgres_server, "SQL_ASCII") as url:
        ledger = Ledger(url)
        ledger.migrate()
        ledger.create_job(NewJob("job", "q", "Zoë ☃", "/out", "f", 1), [NewShard(0, 1, "/spool")])
        assert [job.model for job in ledger.jobs()] == ["Zoë ☃"]
        ledger.close()


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


def test_postgres_connections_notice_that_their_other_end_has_vanished(postgres_server: str) -> None:
    """Which nothing here can show: a host that is cut off does not say so, and the kernel's patience is hours."""
    database = Database(postgres_server + "&keepalives_idle=7")
    with database.read() as connection:
        driver_connection = connection.connection.driver_connection
        assert isinstance(driver_connection, psycopg.Connection)
        told = driver_connection.info.get_parameters()
    database.close()
    assert told["tcp_user_timeout"] == "10000"
    assert (told["keepalives_idle"], told["keepalives_interval"], told["keepalives_count"]) == ("7", "2", "3")


def test_clock_is_the_hosts(database_url: str) -> None:
    database = Database(database_url)
    before = time.time()
    with database.read() as connection:
        assert before - 1 <= connection.scalars(now().select()).one() <= time.time() + 1
    database.close()


def stand_still(database: Database) -> str:
    """In mid transaction, until another has had to wait for it."""
    with database.write() as connection:
        connection.execute(select(shards).with_for_update())
        connection.execute(text("set idle_in_transaction_session_timeout = '10ms'"))
        with database.write() as other:
            assert other.scalar(text("show idle_in_transaction_session_timeout")) == "10s"
            return other.scalars(select(shards.c.id).with_for_update()).one()


def test_who_stands_still_in_a_transaction_does_not_keep_its_locks(postgres_server: str) -> None:
    """As a worker that was stopped there: the server ends its connection, and it may try again."""
    with new_database(postgres_server) as url:
        ledger = Ledger(url)
        ledger.migrate()
        ledger.create_job(NewJob("job", "q", "m", "/out", "f", 1), [NewShard(0, 1, "/spool")])
        # The server's last words, unless its end of the connection was closed before they were read.
        with pytest.raises(LedgerUnavailable, match=r"idle-in-transaction|server closed the connection"):
            stand_still(ledger.database)
        ledger.close()


def test_who_waits_in_vain_for_a_connection_may_try_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As while others wait for a database that is locked or hangs."""
    database = Database(f"sqlite:///{tmp_path / 'ledger.db'}")
    monkeypatch.setattr(database.engine.pool, "_timeout", 0.01)
    with ExitStack() as stack, pytest.raises(LedgerUnavailable, match="limit of size"):
        deque(stack.enter_context(database.read()) for _ in range(100))
    database.close()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ledger.db", "use sqlite:////path"),
        ("postgresql://localhost:x/y", "use sqlite:////path"),
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
