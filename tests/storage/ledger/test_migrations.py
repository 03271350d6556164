"""The schema is golden: what the migrations build is what `tables.py` declares."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import JSON, Column, Connection, MetaData, inspect, select, text

from headrace.storage.database import Database
from headrace.storage.errors import LedgerError
from headrace.storage.ledger.ledger import Ledger
from headrace.storage.ledger.migrate import migrate
from headrace.storage.ledger.tables import SCHEMA_REVISION, metadata

MIGRATE = "import sys; from headrace.storage.ledger.ledger import Ledger; Ledger(sys.argv[1]).migrate()"
MIGRATE_ON_SIGNAL = f"import sys, alembic.command; print('ready', flush=True); sys.stdin.readline(); {MIGRATE}"


def test_migrated_database_equals_the_declared_tables(database_url: str) -> None:
    database = Database(database_url)
    migrate(database)
    with database.read() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
    database.close()


def test_declared_revision_is_the_newest() -> None:
    config = Config()
    config.set_main_option("script_location", "headrace.storage.ledger:migrations")
    assert ScriptDirectory.from_config(config).get_current_head() == SCHEMA_REVISION


def test_several_processes_migrate_at_once(database_url: str) -> None:
    processes = [_process_that_migrates_on_signal(database_url) for _ in range(4)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    assert [process.communicate(timeout=60)[1] for process in processes] == [""] * 4
    database = Database(database_url)
    with database.read() as connection:
        assert set(metadata.tables) < set(inspect(connection).get_table_names())
    database.close()


def _process_that_migrates_on_signal(url: str) -> "subprocess.Popen[str]":
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", MIGRATE_ON_SIGNAL, url]
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def test_newer_database_is_refused(database_url: str) -> None:
    database = Database(database_url)
    migrate(database)
    with database.write() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(LedgerError, match="newer headrace"):
        migrate(database)
    database.close()


def test_migrated_database_is_opened_without_alembic(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    Ledger(url).migrate()
    check = f"{MIGRATE}; assert 'alembic' not in sys.modules"
    subprocess.run([sys.executable, "-c", check, url], check=True, timeout=60)


def test_a_job_of_the_first_schema_is_still_there(database_url: str) -> None:
    database = _database_of("0001", database_url)
    with database.write() as connection:
        connection.execute(
            text(
                "insert into jobs (id, state, queue, model, output_dir, fingerprint, num_rows, num_planned_errors, "
                "spec, created_at) values ('job-1', 'running', 'q', 'm', 'o', 'f', 3, 1, '{}', 5.0)"
            )
        )
    migrate(database)
    database.close()
    job = Ledger(database_url).job("job-1")
    assert (job.num_rows, job.num_planned_errors, job.prompt_tokens) == (3, 1, None)


# The first, and those after which tables are altered that came later.
@pytest.mark.parametrize("revision", ["0001", "0008", "0011"])
def test_what_an_earlier_schema_holds_is_kept(database_url: str, revision: str) -> None:
    database = _database_of(revision, database_url)
    earlier = MetaData()
    with database.write() as connection:
        earlier.reflect(connection)
        earlier.remove(earlier.tables["alembic_version"])
        for table in earlier.sorted_tables:
            connection.execute(table.insert(), {column.name: _some_value(column) for column in table.columns})
        before = _rows(connection, earlier)
    migrate(database)
    with database.read() as connection:
        assert _rows(connection, earlier) == before
    database.close()


def _database_of(revision: str, url: str) -> Database:
    """One that a headrace with that schema has made."""
    config, database = Config(), Database(url)
    config.set_main_option("script_location", "headrace.storage.ledger:migrations")
    with database.write() as connection:
        config.attributes |= {"connection": connection, "target_metadata": metadata}
        command.upgrade(config, revision)
    return database


def _some_value(column: "Column[Any]") -> Any:
    """The same in all columns of a type, so that what refers to something finds it."""
    values = {str: "a", int: 1, float: 1.5, dict: {"a": 1}}
    return values[dict if isinstance(column.type, JSON) else column.type.python_type]


def _rows(connection: Connection, tables: MetaData) -> dict[str, list[tuple[Any, ...]]]:
    return {
        name: sorted(map(tuple, connection.execute(select(table))), key=repr) for name, table in tables.tables.items()
    }
