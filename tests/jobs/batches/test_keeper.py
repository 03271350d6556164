"""Batches that nobody works on, tenants that do not see each other, and servers that are killed over their work."""

import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import pytest
from openai import APIStatusError, NotFoundError, OpenAI

from headrace.jobs.api.models import ServedModel
from headrace.jobs.batches.files import FileStore
from headrace.storage.errors import UnknownFile
from headrace.storage.ledger.batch_records import BatchRecord
from headrace.storage.ledger.file_records import NewFile
from headrace.storage.ledger.ledger import Ledger

from ..api.batch_lines import CHAT, chat_line, create, file_lines, jsonl, wait_for
from ..api_server import ApiServer, start_api, stop_api
from ..running import MODEL

MAX_FILE_BYTES = 100_000
LEASE_SECONDS = 1.0


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("unattended")


def start(data_dir: Path, log: Path) -> ApiServer:
    settings = {"HEADRACE_MAX_FILE_BYTES": str(MAX_FILE_BYTES), "HEADRACE_LEASE_SECONDS": str(LEASE_SECONDS)}
    return start_api(data_dir, log, **settings)


@pytest.fixture(scope="module")
def keys(data_dir: Path) -> dict[str, str]:
    """The API keys of two tenants."""
    ledger = Ledger(f"sqlite:///{data_dir / 'headrace.db'}")
    ledger.migrate()
    secrets = {tenant: ledger.api_keys.create(tenant).secret for tenant in ("ours", "theirs")}
    ledger.close()
    return secrets


@pytest.fixture(scope="module")
def unattended(data_dir: Path, keys: dict[str, str]) -> Iterator[ApiServer]:
    """A server without workers."""
    server = start(data_dir, data_dir / "log")
    yield server
    with suppress(ProcessLookupError):
        stop_api(server, data_dir / "log")


def client_of(server: ApiServer, key: str) -> Any:
    return OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=90)


@pytest.fixture
def ours(unattended: ApiServer, keys: dict[str, str]) -> OpenAI:
    return client_of(unattended, keys["ours"])


@pytest.fixture
def theirs(unattended: ApiServer, keys: dict[str, str]) -> OpenAI:
    return client_of(unattended, keys["theirs"])


def test_what_nobody_works_on_expires_in_time(ours: Any) -> None:
    lines = [chat_line("a"), chat_line("b"), chat_line("bad", temperature=-1)]
    done = wait_for(ours, create(ours, lines, "1s"))
    assert (done.status, done.output_file_id, done.completed_at) == ("expired", None, None)
    assert done.expired_at >= done.expires_at == done.created_at + 1
    assert done.request_counts.model_dump() == {"total": 3, "completed": 0, "failed": 3}
    errors = file_lines(ours, done.error_file_id)
    assert errors.keys() == {"a", "b", "bad"}
    for custom_id in ("a", "b"):
        assert errors[custom_id]["response"] is None
        assert errors[custom_id]["error"]["code"] == "batch_expired"
    assert errors["bad"]["response"]["body"]["error"]["param"] == "temperature"


def test_what_was_not_begun_can_be_cancelled(ours: Any, data_dir: Path, wait_until: Callable[..., None]) -> None:
    batch = wait_for(ours, create(ours, [chat_line("a"), chat_line("b")]), "in_progress")
    # By this other servers know that it is not theirs to judge.
    noted = stored(data_dir, batch.id).served_models
    assert isinstance(noted, dict)
    assert {name: ServedModel.read(each).exact_name for name, each in noted.items()} == {
        MODEL.name: str(MODEL),
        str(MODEL): str(MODEL),
    }
    done = wait_for(ours, ours.batches.cancel(batch.id))
    assert (done.status, done.output_file_id) == ("cancelled", None)
    assert {line["error"]["code"] for line in file_lines(ours, done.error_file_id).values()} == {"batch_cancelled"}
    wait_until(lambda: not (data_dir / "jobs" / done.job_id).exists(), "the spool is gone")


def test_tenants_see_only_what_is_theirs(ours: Any, theirs: Any) -> None:
    batch = create(ours, [])
    file_id = batch.input_file_id
    assert [each.id for each in theirs.batches.list()] == [each.id for each in theirs.files.list()] == []
    calls: list[Callable[[], Any]] = [
        lambda: theirs.files.retrieve(file_id),
        lambda: theirs.files.content(file_id),
        lambda: theirs.files.delete(file_id),
        lambda: theirs.files.list(after=file_id),
        lambda: theirs.batches.create(input_file_id=file_id, endpoint=CHAT, completion_window="24h"),
        lambda: theirs.batches.retrieve(batch.id),
        lambda: theirs.batches.cancel(batch.id),
        lambda: theirs.batches.list(after=batch.id),
    ]
    for call in calls:
        with pytest.raises(NotFoundError):
            call()
    assert wait_for(ours, batch).status == "failed"
    assert ours.files.retrieve(file_id).id == file_id


def test_a_file_beyond_the_limit_is_refused(ours: Any, data_dir: Path) -> None:
    ours.files.create(file=("fits.jsonl", b"x" * MAX_FILE_BYTES), purpose="batch")
    # The second is refused by its announced length alone.
    for num_bytes in (MAX_FILE_BYTES + 1, 3 * 2**20):
        with pytest.raises(APIStatusError) as refused:
            ours.files.create(file=("large.jsonl", b"x" * num_bytes), purpose="batch")
        assert (refused.value.status_code, refused.value.type) == (413, "invalid_request_error")
        assert str(MAX_FILE_BYTES)[:3] in refused.value.message or "larger than" in refused.value.message
    assert not list((data_dir / "files").glob(".incoming-*"))


def test_an_input_file_that_is_gone_fails_its_batch(ours: Any, data_dir: Path) -> None:
    file = ours.files.create(file=("lines.jsonl", jsonl([chat_line("a")])), purpose="batch")
    (data_dir / "files" / file.id).unlink()
    batch = ours.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    assert wait_for(ours, batch).status == "failed"
    with pytest.raises(NotFoundError):
        ours.files.content(file.id)


def held_up(data_dir: Path, name: str, event: str) -> None:
    """Have the ledger refuse something from now on."""
    execute(data_dir, f"CREATE TRIGGER {name} BEFORE {event} BEGIN SELECT RAISE(ABORT, 'held up'); END")


def execute(data_dir: Path, statement: str) -> None:
    connection = sqlite3.connect(data_dir / "headrace.db", timeout=30)
    with closing(connection), connection:
        connection.execute(statement)


def kill(server: ApiServer) -> None:
    server.process.kill()
    server.process.wait()
    server.process.stdout.close()
    server.http.close()


@pytest.fixture
def start_own(tmp_path: Path) -> Iterator[Callable[[], ApiServer]]:
    """Starts servers over the test's folder, none of which outlives the test, however it ends."""
    with ExitStack() as stack:

        def start_another() -> ApiServer:
            server = start(tmp_path, tmp_path / "log")
            stack.callback(kill, server)
            return server

        yield start_another


def test_a_batch_outlives_the_servers_that_are_killed_over_it(
    tmp_path: Path, start_own: Callable[[], ApiServer], wait_until: Callable[..., None]
) -> None:
    lines = [chat_line(f"row-{number}") for number in range(40)]
    files = tmp_path / "files"
    server = start_own()
    held_up(tmp_path, "no_job", "INSERT ON jobs")
    batch = create(client_of(server, "none"), lines, "1s")
    wait_until(lambda: len(list(tmp_path.glob("jobs/*/shard-*.parquet"))) >= 2, "all is spooled, no job recorded")
    kill(server)
    execute(tmp_path, "DROP TRIGGER no_job")
    held_up(tmp_path, "no_end", "UPDATE ON batches WHEN NEW.state = 'expired'")
    server = start_own()
    wait_until(lambda: len(list(files.glob("file-*"))) == 2, "the error file has its name, but is not recorded")
    assert client_of(server, "none").batches.retrieve(batch.id).status == "finalizing"
    kill(server)
    execute(tmp_path, "DROP TRIGGER no_end")
    server = start_own()
    client = client_of(server, "none")
    done = wait_for(client, batch)
    assert (done.status, done.request_counts.failed) == ("expired", 40)
    assert file_lines(client, done.error_file_id).keys() == {line["custom_id"] for line in lines}
    # What was being written again when the server was killed is swept like any stray.
    assert len(client.files.list().data) == len(list(files.glob("file-*"))) == 2
    # Of all that was begun one job was recorded, and the rest is gone.
    assert client_jobs(tmp_path) == [done.job_id]
    assert [path.name for path in (tmp_path / "outputs").iterdir()] == client_jobs(tmp_path)
    wait_until(lambda: not list((tmp_path / "jobs").iterdir()), "the spool is gone")
    stop_api(server, tmp_path / "log")


def stored(data_dir: Path, batch_id: str) -> BatchRecord:
    with closing(Ledger(f"sqlite:///{data_dir / 'headrace.db'}")) as ledger:
        return ledger.batches.find(batch_id)


def client_jobs(data_dir: Path) -> list[str]:
    ledger = Ledger(f"sqlite:///{data_dir / 'headrace.db'}")
    try:
        return [job.id for job in ledger.jobs()]
    finally:
        ledger.close()


def test_expired_and_stray_files_are_swept(tmp_path: Path) -> None:
    ledger = Ledger(f"sqlite:///{tmp_path / 'headrace.db'}")
    ledger.migrate()
    store = FileStore(tmp_path / "files", ledger.files, max_bytes=10)
    for name, seconds in (("file-old", 0.0), ("file-new", 3600.0), ("file-ever", None)):
        with store.incoming() as incoming:
            incoming.write(name.encode())
            store.add(incoming, NewFile(name, "t", "batch", name, len(name), incoming.sha256, seconds))
    with pytest.raises(UnknownFile):
        ledger.files.get("t", "file-old")
    for stray in ("file-stray", ".incoming-stray", "file-fresh"):
        (tmp_path / "files" / stray).write_bytes(b"x")
    for name in ("file-stray", ".incoming-stray", "file-ever"):
        past = time.time() - 2 * 86400
        os.utime(tmp_path / "files" / name, (past, past))
    # As a file looks that has gone since the folder was listed.
    (tmp_path / "files/.incoming-gone").symlink_to("nowhere")
    store.sweep()
    (tmp_path / "files/.incoming-gone").unlink()
    assert {path.name for path in (tmp_path / "files").iterdir()} == {"file-new", "file-ever", "file-fresh"}
    assert {file.id for file in ledger.files.page("t", 10)} == {"file-new", "file-ever"}
    ledger.close()
