"""One ledger suite for both databases: `ledger` is an empty, migrated one in SQLite and in PostgreSQL."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy.engine import make_url

from headrace.storage.ledger.ledger import Ledger
from headrace.storage.ledger.records import NewJob, NewShard
from headrace.storage.output.address import open_folder
from headrace.storage.output.folder import OutputFolder

from ..ledgers import new_ledger
from ..postgres import new_schema, postgres_binaries, running_postgres
from ..shelf import make_bucket

BACKENDS = ["sqlite", "postgresql"]


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """The URL of a server's maintenance database: the one given, or one of our own."""
    given = os.environ.get("HEADRACE_TEST_POSTGRES_URL")
    binaries = postgres_binaries()
    if given:
        yield given
    elif binaries:
        with running_postgres(binaries) as server:
            yield server.url
    elif os.environ.get("CI"):
        pytest.fail("CI has no PostgreSQL: install it or set HEADRACE_TEST_POSTGRES_URL")
    else:
        pytest.skip("no PostgreSQL: install it or set HEADRACE_TEST_POSTGRES_URL")


@pytest.fixture(params=BACKENDS)
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty database without tables; in PostgreSQL a schema."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'ledger.db'}"
        return
    with new_schema(request.getfixturevalue("postgres_server")) as url:
        yield url


@pytest.fixture
def ledger(database_url: str) -> Iterator[Ledger]:
    file = make_url(database_url).database or ""
    ledger = new_ledger(Path(file)) if database_url.startswith("sqlite") else Ledger(database_url)
    ledger.migrate()
    yield ledger
    ledger.close()


@pytest.fixture(params=["disk", "store"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> OutputFolder:
    """One that is not there."""
    if request.param == "disk":
        return open_folder(tmp_path / "a" / "b")
    request.getfixturevalue("shelf")
    make_bucket("bucket")
    return open_folder("shelf://bucket/a/b")


@pytest.fixture
def create_job(ledger: Ledger) -> Callable[..., str]:
    """Records a job with shards of two rows each and returns its id."""

    def create(job_id: str = "job-1", num_shards: int = 2, queue: str = "bulk") -> str:
        job = NewJob(
            id=job_id,
            queue=queue,
            model="tiny",
            output_dir="/out",
            fingerprint="abc",
            num_rows=2 * num_shards,
            spec={"max_tokens": 8},
            num_planned_errors=1,
        )
        shards = [NewShard(number, 2, f"/spool/{number}.parquet") for number in range(num_shards)]
        ledger.create_job(job, shards)
        return job_id

    return create
