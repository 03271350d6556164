"""Shards whose parts go to an object store: what attempts leave there that end early, late or in vain."""

from dataclasses import replace

import pyarrow as pa
import pytest

from headrace.jobs.client.verbs import delete_job, retry_job
from headrace.jobs.results.stored_results import first_error, read_results
from headrace.jobs.shards.finishing import remove_strays
from headrace.storage.errors import OutputNotEmpty
from headrace.storage.ledger.records import JobState, NewShard
from headrace.storage.output.address import open_folder
from headrace.storage.output.folder import OutputFolder
from headrace.storage.output.manifest import Manifest, read_report, write_manifest
from headrace.storage.output.parts import part_file_name

from ...shelf import keys
from ..attempts import ROWS, ask, in_store, replace_job, stop_after
from ..conftest import wait_until
from ..shop import JOB, OVER, SHARD, Shop


@pytest.fixture
def shop(shop: Shop, request: pytest.FixtureRequest) -> Shop:
    return in_store(shop, request)


@pytest.fixture
def folder(shop: Shop) -> OutputFolder:
    return open_folder(shop.address)


def write_stray(shop: Shop, folder: OutputFolder, shard_number: int, attempt_id: int, job_id: str = JOB) -> str:
    """A part that an attempt has not committed; its rows would be there twice."""
    name = part_file_name(job_id, shard_number, attempt_id, 90)
    folder.write_part(name, shop.table() if committed(shop) else pa.table({"row": [0]}))
    return name


def committed(shop: Shop) -> list[str]:
    return sorted(part.file_name for part in shop.ledger.parts(JOB))


def test_a_completed_folder_holds_committed_parts_and_the_manifest(shop, folder):
    shop.create(ROWS, sampling={"max_tokens": 4})
    write_manifest(folder, Manifest(JOB, "f"))
    shop.shard_runner().run(SHARD)
    assert keys("out") == ["_headrace.json", *committed(shop)]
    report = read_report(folder) or {}
    assert (report["state"], report["rows"]) == ("completed", {"total": 5, "done": 5, "failed": 0, "truncated": 3})
    assert read_results(shop.ledger, shop.ledger.job(JOB)).equals(shop.table())


def test_what_a_killed_attempt_wrote_is_neither_read_nor_kept(shop, folder, start):
    shop.create(ROWS, sampling={"max_tokens": 4})
    killed = shop.attempt(shop.claim(lease_seconds=OVER))
    stop_after(shop, killed, start, 0, 1)
    before = shop.files()
    stray = write_stray(shop, folder, 0, killed.claim.attempt_id)
    assert read_results(shop.ledger, shop.ledger.job(JOB))["row"].to_pylist() == [0, 1]
    started = shop.runner.num_sequences_started
    shop.attempt().run()
    shop.assert_complete()
    assert stray not in shop.files()
    assert shop.files().items() >= before.items()
    # One more may have been under way when the first attempt was stopped.
    assert shop.runner.num_sequences_started - started in (3, 4)


def test_the_rows_of_a_part_that_is_gone_are_generated_again(shop, folder, start):
    shop.create(ROWS, sampling={"max_tokens": 4})
    stop_after(shop, shop.attempt(), start, 0, 1)
    (name, *_) = committed(shop)
    folder.withdraw(name)
    shop.attempt().run()
    shop.assert_complete()
    assert name not in committed(shop)


def test_what_comes_late_goes_when_the_job_completes(shop, folder, start):
    """Written by an attempt that was stopped past its lease, after the next one had tidied up."""
    shop.create(ROWS, sampling={"max_tokens": 4})
    late = shop.claim(lease_seconds=OVER)
    shop.runner.close()
    running = start(shop.shard_runner().run, SHARD)
    shop.runner.wait_until_reached()
    folder.write_part(part_file_name(JOB, 0, late.attempt_id, 0), pa.table({"row": [0]}))
    shop.runner.open()
    running.result()
    shop.assert_complete()


def test_only_what_can_never_be_committed_is_removed(shop, folder):
    shop.create(ROWS, sampling={"max_tokens": 4})
    shop.shard_runner().run(SHARD)
    before = shop.files()
    shop.ledger.retry_job(JOB, [NewShard(1, 1, shop.ledger.shards(JOB)[0].spool_path, retry_of=0)])
    at_work = shop.ledger.leases.claim_next("q", "worker", 60)
    assert at_work is not None
    kept = [
        write_stray(shop, folder, 1, at_work.attempt_id),
        # An attempt that begins after the ledger was asked.
        write_stray(shop, folder, 1, at_work.attempt_id + 1),
    ]
    gone = [write_stray(shop, folder, 0, at_work.attempt_id - 1), write_stray(shop, folder, 7, 0)]
    remove_strays(shop.ledger, JOB, folder)
    assert shop.files().keys() == {*before, *kept}
    assert not set(gone) & shop.files().keys()


def test_nothing_is_removed_from_a_folder_that_is_another_jobs_by_now(shop, folder):
    """Another ledger's, where attempts have the same numbers."""
    shop.create(ROWS, sampling={"max_tokens": 4})
    write_manifest(folder, Manifest("job_2", "g"))
    folder.write_part(part_file_name(JOB, 7, 0, 0), pa.table({"row": [0]}))
    before = shop.files()
    shop.shard_runner().run(SHARD)
    assert shop.files().items() >= before.items()
    folder.remove(["_headrace.json"])
    remove_strays(shop.ledger, JOB, folder)
    assert sorted(shop.files()) == committed(shop)


def test_strays_of_the_jobs_that_were_there_before_go_and_those_of_others_stay(shop, folder):
    shop.create(ROWS, sampling={"max_tokens": 4})
    before = {job_id: replace_job(shop, job_id) for job_id in ("job_replaced", "job_running")}
    shop.ledger.cancel_job("job_replaced")
    gone, kept = (write_stray(shop, folder, 0, claim.attempt_id, job) for job, claim in before.items())
    kept_too = write_stray(shop, folder, 0, 1, "job of another ledger")
    shop.shard_runner().run(SHARD)
    assert gone not in shop.files()
    assert {kept, kept_too} <= shop.files().keys()


def test_a_store_that_refuses_is_named_as_what_the_job_waits_for(shop, folder, monkeypatch):
    shop.create(ROWS, sampling={"max_tokens": 4})
    with monkeypatch.context() as patch:
        patch.setenv("SHELF_ROOT", "/nowhere")
        shop.shard_runner().run(SHARD)
        progress = shop.ledger.progress(JOB)
    assert progress.state is JobState.RUNNING
    assert progress.error.startswith(
        "cannot write shelf://out/part-00000-01-000-aa2a0f0a.parquet: The specified bucket"
    )
    shop.ledger.messages.due_retries("q")
    shop.shard_runner().run(SHARD)
    shop.assert_complete()


def test_rows_that_a_store_does_not_take_are_kept_until_it_does(shop, folder, start, monkeypatch, caplog):
    """Other workers could not write them either."""
    shop.create(ROWS, sampling={"max_tokens": 4})
    with monkeypatch.context() as patch:
        patch.setenv("SHELF_ROOT", "/nowhere")
        running = start(shop.attempt(tools=replace(shop.tools, store_seconds=120.0)).run)
        wait_until(lambda: "cannot be written" in caplog.text, "it was tried in vain")
        assert "bucket" in (shop.ledger.progress(JOB).error or "")
    assert running.result(60) is JobState.COMPLETED
    shop.assert_complete()
    assert shop.runner.num_sequences_started == len(ROWS)


def test_errors_are_read_and_tried_again_from_the_store(shop, folder):
    shop.create(ask((1, 2), (99,)), sampling={"max_tokens": 4})
    shop.shard_runner().run(SHARD)
    assert first_error(shop.ledger, shop.ledger.job(JOB)).startswith("(row 1): token id 99")
    assert retry_job(shop.ledger, JOB) == [f"{JOB}/00001"]


def test_a_deleted_job_takes_its_data_set_along_but_nothing_else(shop, folder):
    shop.create(ROWS, sampling={"max_tokens": 4})
    write_manifest(folder, Manifest(JOB, "f"))
    shop.shard_runner().run(SHARD)
    folder.replace("mine.txt", b"keep")
    with pytest.raises(OutputNotEmpty, match=r"mine\.txt"):
        delete_job(shop.ledger, shop.folder / "jobs", JOB, with_output=True)
    folder.remove(["mine.txt"])
    delete_job(shop.ledger, shop.folder / "jobs", JOB, with_output=True)
    assert keys("out") == []
