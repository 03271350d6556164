"""Whose an output folder is, and what is left in it of a job that is refused."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from headrace.jobs.client.client import Client, Job
from headrace.jobs.errors import JobMismatchError
from headrace.jobs.planning import work
from headrace.jobs.planning.producer import Terms
from headrace.jobs.settings import Settings
from headrace.jobs.spec.schemas import JobSpec
from headrace.storage.errors import InputError, LedgerUnavailable, OutputNotEmpty, SinkError, StorageError
from headrace.storage.ledger.ledger import Ledger
from headrace.storage.ledger.quotas import Quota, QuotaExceeded
from headrace.storage.ledger.records import JobState
from headrace.storage.output import held_file
from headrace.storage.output.address import open_folder
from headrace.storage.output.folder import OutputFolder
from headrace.storage.output.manifest import Manifest, OutputMode, complete_manifest, read_manifest
from headrace.storage.readers import open_input
from headrace.storage.rows.spool import lock_of

from ...shelf import make_bucket
from ..running import LABELS, MODEL, environment, write_unreadable_parquet

ROWS = [{"text": f"Where is parcel {number}?"} for number in range(5)]
SPEC: dict[str, Any] = {"prompt": "{text}", "choices": LABELS}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Client, Client]]:
    """Clients of two ledgers; nobody works on their jobs."""
    with ExitStack() as stack:
        folder = tmp_path_factory.mktemp("ledgers")
        settings = [Settings.from_environment(environment(folder / name)) for name in ("one", "other")]
        one, other = (stack.enter_context(Client(each)) for each in settings)
        yield one, other


@pytest.fixture
def client(two: tuple[Client, Client]) -> Client:
    return two[0]


def submit(client: Client, output: str | Path, mode: str = "new", **more: Any) -> Job:
    return client.submit(ROWS, MODEL, output, mode=mode, **{**SPEC, **more})


def with_bad_input(client: Client, folder: Path, output: Path) -> None:
    client.submit(write_unreadable_parquet(folder / "rows.parquet"), MODEL, output, **SPEC)


def with_bad_sink(client: Client, folder: Path, output: Path) -> None:
    sink = f"sqlite:///{folder / 'sink.db'}"
    Ledger(sink).migrate()
    # There is such a table, which is not ours.
    submit(client, output, sink=sink, sink_table="jobs")


def beyond_a_quota(client: Client, folder: Path, output: Path) -> None:
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    spec = JobSpec.parse(model=str(MODEL), sampling={}, **SPEC)
    terms = Terms(quota=Quota(queued_tokens=1))
    client.submit_spec(open_input(rows), spec, output, OutputMode.NEW, terms=terms)


REFUSALS = [(with_bad_input, InputError), (with_bad_sink, SinkError), (beyond_a_quota, QuotaExceeded)]


@pytest.mark.parametrize(("attempt", "error"), REFUSALS)
@pytest.mark.parametrize("is_there", [True, False])
def test_a_job_that_is_refused_late_leaves_the_folder_as_it_was(
    client: Client, tmp_path: Path, attempt: Callable[..., None], error: type[Exception], is_there: bool
) -> None:
    output = tmp_path / "out"
    if is_there:
        output.mkdir()
    spools = list(client.jobs_folder.glob("job_*"))
    with pytest.raises(error):
        attempt(client, tmp_path, output)
    assert output.exists() == is_there
    assert not is_there or not list(output.iterdir())
    assert list(client.jobs_folder.glob("job_*")) == spools


def test_a_disk_that_fills_while_rows_are_spooled_gets_its_room_back_and_the_job_can_be_resumed(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_half(path: Path, *arguments: Any, **options: Any) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"PAR1")
        raise StorageError(f"cannot write {path}: No space left on device")

    spools = list(client.jobs_folder.glob("job_*"))
    with monkeypatch.context() as full_disk:
        full_disk.setattr(work, "write_shard", write_half)
        with pytest.raises(StorageError, match="No space left"):
            submit(client, tmp_path / "out")
    assert list(client.jobs_folder.glob("job_*")) == spools
    assert submit(client, tmp_path / "out", mode="resume").record.num_rows == len(ROWS)


def test_a_job_whose_recording_is_not_answered_is_recorded_once(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = Ledger.create_job

    def create_without_answer(ledger: Ledger, *arguments: Any) -> None:
        create(ledger, *arguments)
        raise LedgerUnavailable("the connection was reset")

    monkeypatch.setattr(Ledger, "create_job", create_without_answer)
    job = submit(client, tmp_path / "out", idempotency_key="key")
    assert client.jobs(1)[0].id == job.id
    assert all(Path(shard.spool_path).exists() for shard in client.ledger.shards(job.id))
    assert read_manifest(open_folder(tmp_path / "out")) == Manifest(job.id, job.record.fingerprint)


@pytest.fixture(params=["disk", "store"])
def output(request: pytest.FixtureRequest, tmp_path: Path) -> OutputFolder:
    if request.param == "disk":
        return open_folder(tmp_path / "out")
    request.getfixturevalue("shelf")
    make_bucket("bucket")
    return open_folder("shelf://bucket/out")


def test_a_folder_of_another_ledgers_open_job_is_refused_in_every_mode(
    two: tuple[Client, Client], output: OutputFolder
) -> None:
    one, other = two
    job, jobs = submit(one, str(output)), other.jobs()
    before = {name: output.read(name) for name in output.names()}
    refusals: list[tuple[str, type[Exception], str]] = [
        ("new", OutputNotEmpty, "is not empty"),
        ("resume", JobMismatchError, f"belongs to job {job.id} of another ledger: set HEADRACE_DATA_DIR"),
        ("overwrite", OutputNotEmpty, f"job {job.id} of another ledger, whose workers may still write .*--output-too"),
    ]
    for mode, error, words in refusals:
        with pytest.raises(error, match=words) as refusal:
            submit(other, str(output), mode)
        assert "\n" not in str(refusal.value)
    assert {name: output.read(name) for name in output.names()} == before
    assert other.jobs() == jobs
    assert submit(one, str(output), "resume").id == job.id
    # As the message says.
    job.delete(with_output=True)
    submit(other, str(output))


def test_a_folder_that_another_ledgers_job_has_completed_is_overwritten(
    two: tuple[Client, Client], output: OutputFolder
) -> None:
    one, other = two
    job = submit(one, str(output))
    complete_manifest(output, Manifest(job.id, job.record.fingerprint), lambda: {"state": JobState.COMPLETED})
    with pytest.raises(JobMismatchError, match="of another ledger"):
        submit(other, str(output), "resume")
    new = submit(other, str(output), "overwrite")
    found = read_manifest(output)
    assert found is not None
    assert (found.job_id, found.ledger) == (new.id, other.ledger.identity)


def test_a_folder_of_before_ledgers_were_noted_is_overwritten(client: Client, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/_headrace.json").write_text('{"job_id": "job_old", "fingerprint": "f"}')
    new = submit(client, tmp_path / "out", "overwrite")
    found = read_manifest(open_folder(tmp_path / "out"))
    assert found is not None
    assert found.job_id == new.id


@pytest.fixture
def killed(client: Client, tmp_path: Path) -> tuple[Path, list[Path]]:
    """An output folder whose job was not recorded when its submitter was killed, and what that has left of it."""
    job = submit(client, tmp_path / "out")
    client.ledger.cancel_job(job.id)
    client.ledger.delete_job(job.id)
    spool = client.jobs_folder / job.id
    assert spool.is_dir()
    lock_of(spool).touch()
    return tmp_path / "out", [spool, lock_of(spool)]


def test_what_a_killed_submitter_has_left_goes_when_somebody_submits(
    client: Client, killed: tuple[Path, list[Path]], tmp_path: Path
) -> None:
    _, left = killed
    recorded = submit(client, tmp_path / "recorded")
    spools = [client.jobs_folder / name for name in (left[0].name, recorded.id, "job_anothers", "job_begun")]
    for spool in spools:
        spool.mkdir(exist_ok=True)
        lock_of(spool).write_text("another" if spool.name == "job_anothers" else client.ledger.identity)
    with Client(client.settings) as next_client, held_file.held_lock(lock_of(spools[-1]), client.ledger.identity):
        submit(next_client, tmp_path / "next")
        assert [spool.exists() for spool in spools] == [False, True, True, True]
    assert not left[1].exists()


def test_inputs_that_a_killed_submitter_has_left_go_a_day_later(client: Client, tmp_path: Path) -> None:
    inputs = client.settings.inputs_folder
    left = [inputs / name for name in ("old.jsonl", "tmp_old", "new.jsonl")]
    left[1].mkdir(parents=True)
    for path in (left[0], left[1] / "input.jsonl", left[2]):
        path.write_text("{}")
    for path in left[:2]:
        os.utime(path, (0, 0))
    with Client(client.settings) as next_client:
        submit(next_client, tmp_path / "next")
    assert [path.exists() for path in left] == [False, False, True]


def test_what_a_killed_submitter_has_left_goes_when_its_folder_is_overwritten(
    client: Client, killed: tuple[Path, list[Path]]
) -> None:
    output, left = killed
    submit(client, output, "overwrite")
    assert [path for path in left if path.exists()] == []


def test_a_folder_whose_job_is_being_submitted_is_not_overwritten(
    client: Client, killed: tuple[Path, list[Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    output, left = killed
    monkeypatch.setattr(held_file, "_PATIENCE_SECONDS", 0.1)
    with held_file.held_lock(left[1]), pytest.raises(JobMismatchError, match="being submitted by another process"):
        submit(client, output, "overwrite")
    assert left[0].exists()


def test_of_two_that_overwrite_at_once_one_gets_the_folder(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one comes when the first has cancelled the job that it replaces."""
    replaced = submit(client, tmp_path / "out")
    output = open_folder(tmp_path / "out")
    second: list[Job] = []

    def overwrite() -> None:
        second.append(submit(client, str(output), "overwrite"))

    monkeypatch.setattr(type(output), "exists", _after(type(output).exists, overwrite))
    with pytest.raises(OutputNotEmpty, match="was taken by another job"):
        submit(client, str(output), "overwrite")
    found = read_manifest(output)
    assert found is not None
    assert found.job_id == second[0].id
    assert second[0].progress().state is JobState.RUNNING
    assert replaced.progress().state is JobState.CANCELLED


@pytest.mark.parametrize("end", [Job.cancel, Job.delete])
def test_the_lock_that_a_killed_submitter_has_left_goes_with_its_job(
    client: Client, tmp_path: Path, end: Callable[[Job], None]
) -> None:
    job = submit(client, tmp_path / "out")
    lock = lock_of(client.jobs_folder / job.id)
    lock.touch()
    end(job)
    assert not lock.exists()


def test_of_two_ledgers_that_come_at_once_one_gets_the_folder(
    two: tuple[Client, Client], output: OutputFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one comes when the first has seen that the folder is empty."""
    one, other = two
    jobs = one.jobs()
    monkeypatch.setattr(type(output), "create", _after(type(output).create, lambda: submit(other, str(output))))
    with pytest.raises(StorageError, match="was taken by another job"):
        submit(one, str(output))
    assert one.jobs() == jobs
    found = read_manifest(output)
    assert found is not None
    assert found.job_id == other.jobs(1)[0].id


def _after(original: Callable[..., Any], act: Callable[[], object]) -> Callable[..., Any]:
    """The original, once `act` is done, which comes by here itself."""
    is_first = True

    def wrapper(*arguments: Any) -> Any:
        nonlocal is_first
        if is_first:
            is_first = False
            act()
        return original(*arguments)

    return wrapper
