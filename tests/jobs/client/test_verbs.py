"""Jobs that are queued, held up, let go on, stopped, tried again and forgotten: by command, from Python, over HTTP."""

import json
import math
import sqlite3
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest
from fastapi.testclient import TestClient
from grpc import StatusCode
from sqlalchemy import update

from headrace.jobs.api.app import create_app
from headrace.jobs.api.models import ServedModels
from headrace.jobs.client import verbs
from headrace.jobs.errors import LaterVersion, NotRetriable, SpecError
from headrace.jobs.grpc.statuses import status_of
from headrace.jobs.workers.local_workers import log_of_worker
from headrace.storage.errors import JobEnded, UnknownJob
from headrace.storage.ledger.batch_records import NewBatch
from headrace.storage.ledger.records import JobState, NewJob, NewWebhook, ShardState
from headrace.storage.ledger.tables import jobs
from headrace.storage.output.address import open_folder
from headrace.storage.output.folder import OutputFolder
from headrace.storage.output.parts import part_file_name

from ..running import LABELS, MODEL, Result, assert_refused, label_arguments, listed_jobs

SECONDS = 120.0
FAST: dict[str, Any] = {"prompt": "{text}", "choices": LABELS}
ROWS = [{"text": f"Where is parcel {number}?"} for number in range(80)]
# So hot that every token is as likely as the one that ends: most rows take their thousand tokens.
SLOW: dict[str, Any] = {"prompt": "{text}", "max_tokens": 1000, "temperature": 10_000}


def submitted(result: Result) -> str:
    assert result.status == 0, result.err
    (job_id,) = result.out.split()
    return job_id


def test_submit_queues_and_watch_follows_to_the_end(served, headrace, few, tmp_path):
    arguments = ["submit", *label_arguments(few, tmp_path / "out")[1:]]
    job_id = submitted(headrace(served, *arguments))
    watched = headrace(served, "watch", job_id)
    assert watched.status == 0
    assert f"{job_id} completed" in watched.out
    assert "12 of 12" in watched.out
    assert ds.dataset(str(tmp_path / "out"), exclude_invalid_files=True).count_rows() == 12


def test_watching_a_job_without_answers_fails_as_its_run_would(served, headrace, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"text": ""}\n')
    job_id = submitted(headrace(served, "submit", *label_arguments(tmp_path / "bad.jsonl", tmp_path / "out")[1:]))
    assert headrace(served, "watch", job_id).status == 1


def test_a_job_nobody_serves_says_how_to_serve_it(headrace, few, tmp_path):
    result = headrace(tmp_path / "data", "submit", *label_arguments(few, tmp_path / "out")[1:])
    assert submitted(result).startswith("job_")
    assert f"headrace worker --model {MODEL}" in result.err


def test_commands_hold_up_let_go_on_and_stop_a_job(headrace, few, tmp_path):
    data = tmp_path / "data"
    job_id = submitted(headrace(data, "submit", *label_arguments(few, tmp_path / "out")[1:]))
    for command, state in (("pause", "paused"), ("pause", "paused"), ("resume", "running"), ("resume", "running")):
        result = headrace(data, command, job_id)
        assert (result.status, result.out) == (0, f"{job_id} is {state}: 0 of 12 rows are committed\n")
    for _ in range(2):
        assert headrace(data, "cancel", job_id).status == 0
    assert headrace(data, "watch", job_id).status == 1
    for command in ("pause", "resume"):
        assert_refused(headrace(data, command, job_id), f"job {job_id} has ended: it is cancelled")
    assert_refused(headrace(data, "retry", job_id), "is cancelled", "only a job that has completed")


def test_a_priority_can_be_given_by_command(headrace, unserved, few, tmp_path):
    job = unserved.submit(few, MODEL, tmp_path / "out", **FAST)
    for priority in ("5", "-3"):
        result = headrace(tmp_path / "unserved", "priority", job.id, priority)
        assert result.status == 0, result.err
        assert unserved.ledger.job(job.id).priority == int(priority)
    job.cancel()
    assert_refused(headrace(tmp_path / "unserved", "priority", job.id, "1"), "has ended")
    assert_refused(headrace(tmp_path / "unserved", "priority", job.id, "1001"), "1000")
    with pytest.raises(SpecError, match=r"^priority must be a whole number from -1000 to 1000, not 1001$"):
        job.set_priority(1001)


def test_a_paused_job_stands_still_keeps_what_it_has_and_goes_on(client, tmp_path, wait_until):
    # So many that it is far from done, however long we are kept from our turn.
    job = client.submit(ROWS * 20, MODEL, tmp_path / "out", **SLOW)
    wait_until(lambda: job.progress().rows_done > 0, "something is committed", SECONDS)
    job.pause()

    def stands_still() -> bool:
        return all(shard.state is not ShardState.RUNNING for shard in client.ledger.shards(job.id))

    wait_until(stands_still, "the attempts have handed back", SECONDS)
    done = job.progress().rows_done
    assert 0 < done < 20 * len(ROWS)
    assert job.progress().state is JobState.PAUSED
    kept = {row["row"]: row for row in job.results().to_pylist()}
    job.resume()
    wait_until(lambda: job.progress().rows_done > done, "more is committed", SECONDS)
    job.cancel()
    assert job.progress().state is JobState.CANCELLED
    rows = {row["row"]: row for row in job.results().to_pylist()}
    assert rows.items() >= kept.items()


def test_what_has_completed_is_not_cancelled_and_has_nothing_to_retry(client, tmp_path):
    job = client.submit(ROWS[:2], MODEL, tmp_path / "out", **FAST)
    job.wait(SECONDS, start_worker=False)
    for verb in (job.cancel, job.pause, job.resume):
        with pytest.raises(JobEnded, match="has ended: it is completed"):
            verb()
    with pytest.raises(NotRetriable, match="no failed row"):
        job.retry()


def test_rows_that_expired_are_in_the_data_set_and_a_retry_answers_them(served, headrace, few, tmp_path):
    arguments = ["submit", *label_arguments(few, tmp_path / "out")[1:], "--within"]
    job_id = submitted(headrace(served, *arguments, "0.000001s"))
    watched = headrace(served, "watch", job_id)
    assert watched.status == 1
    assert "12 failed" in watched.out
    assert "expired: no worker had begun this row" in watched.out
    assert "\ndeadline" in headrace(served, "show", job_id).out
    retried = headrace(served, "retry", job_id)
    # A worker may have done with them before the state is read.
    states = [f"{job_id} is {state}: 12 failed rows of 12 to be asked again\n" for state in ("running", "completed")]
    assert retried.status == 0
    assert retried.out in states
    watched = headrace(served, "watch", job_id)
    assert (watched.status, "0 failed" in watched.out) == (0, True)
    rows = [json.loads(line) for line in headrace(served, "results", job_id).out.splitlines()]
    assert [row["row"] for row in rows] == list(range(12))
    assert all(row["label"] in LABELS for row in rows)


@pytest.mark.parametrize("text", ["soon", "0h", "-1h", "24"])
def test_a_deadline_that_cannot_be_is_refused(served, headrace, few, tmp_path, text):
    result = headrace(served, *label_arguments(few, tmp_path / "out"), "--within", text)
    assert_refused(result, "--within", "24h", text)
    assert not (tmp_path / "out").exists()


def test_a_deleted_job_leaves_its_data_set_unless_told(client, headrace, served, tmp_path):
    for name, more in (("kept", []), ("gone", ["--output-too"])):
        job = client.submit(ROWS[:3], MODEL, tmp_path / name, **FAST)
        job.wait(SECONDS, start_worker=False)
        assert headrace(served, "delete", job.id, *more).status == 0
        with pytest.raises(UnknownJob):
            client.job(job.id)
    assert list((tmp_path / "kept").glob("*.parquet"))
    assert not (tmp_path / "gone").exists()


def test_all_that_ended_before_some_time_are_deleted(unserved, tmp_path, headrace):
    """Except what runs, what holds something that is not ours, and what a batch has yet to read."""
    keys = {"batch": "batch/batch-1"}
    jobs = {
        name: unserved.submit(ROWS[:3], MODEL, tmp_path / name, idempotency_key=keys.get(name), **FAST)
        for name in ("old", "mixed", "batch", "running", "new")
    }
    for name in ("old", "mixed", "batch", "new"):
        jobs[name].cancel()
    # Its keeper was killed before it could say which job it is.
    unserved.ledger.batches.add(NewBatch("batch-1", "t", "/v1/completions", "file-in", "24h", 60.0))
    (tmp_path / "mixed/mine.txt").touch()
    # Of the end of one that is old its webhook has yet to be told.
    told = NewJob("told", "q", str(MODEL), str(tmp_path / "told"), "f", 0, {}, webhook=NewWebhook("https://a.example/"))
    unserved.ledger.create_job(told, [])
    jobs["told"] = unserved.job("told")
    data = tmp_path / "unserved"
    with closing(sqlite3.connect(data / "headrace.db", isolation_level=None)) as ledger:
        for name in ("old", "mixed", "batch", "told"):
            ledger.execute("UPDATE jobs SET finished_at = finished_at - 86400 WHERE id = ?", (jobs[name].id,))

    def left() -> set[str]:
        listed = listed_jobs(headrace(data, "jobs"))
        return {name for name, job in jobs.items() if job.id in listed}

    wanted = ["delete", "--ended-before", "12h", "--output-too"]
    planned = headrace(data, *wanted, "--dry-run")
    assert planned.status == 0
    assert f"{jobs['old'].id} would be deleted" in planned.out
    assert left() == set(jobs)
    done = headrace(data, *wanted)
    assert done.status == 1
    assert f"{jobs['old'].id} is deleted" in done.out
    assert "1 job that ended before" in done.out
    assert "told stays: its webhook has not been told" in done.out
    assert f"{jobs['batch'].id} stays: its batch has not ended" in done.out
    assert f"{jobs['mixed'].id} is not deleted" in done.err
    assert jobs["mixed"].progress().state is JobState.CANCELLED
    assert "mine.txt" in done.err
    assert "0 jobs that ended before" in headrace(data, "delete", "--ended-before", "1000000d").out
    assert left() == set(jobs) - {"old"}
    assert not (tmp_path / "old").exists()
    assert headrace(data, "delete", "--ended-before", "2999-12-31").status == 0
    assert left() == {"batch", "running", "told"}
    webhooks = unserved.ledger.webhooks
    (due,) = (delivery for delivery in webhooks.claim_due(10) if delivery.subject_id == "told")
    webhooks.failed(due, "status 410", is_final=True)
    assert headrace(data, "delete", "--ended-before", "12h").status == 0
    assert left() == {"batch", "running"}


def test_who_deletes_a_job_hears_that_its_webhook_does_not(unserved, tmp_path, headrace):
    job = unserved.submit(ROWS, MODEL, tmp_path / "out", webhook="https://example.com/", **FAST)
    for more, done in ((["--dry-run"], "would be"), ([], "is")):
        deleted = headrace(tmp_path / "unserved", "delete", job.id, *more)
        assert (deleted.status, f"{job.id} {done} deleted" in deleted.out) == (0, True)
        assert "its webhook is told nothing more" in deleted.out


def test_a_retry_that_begins_meanwhile_keeps_a_job(client, tmp_path, monkeypatch):
    job = client.submit(ROWS[:3], MODEL, tmp_path / "out", within_seconds=0.000001, **FAST)
    job.wait(SECONDS, start_worker=False)
    finished_at = client.job(job.id).record.finished_at
    before = math.nextafter(finished_at, math.inf)

    def open_and_retry(address: str) -> OutputFolder:
        monkeypatch.setattr(verbs, "open_folder", open_folder)
        job.retry()
        return open_folder(address)

    monkeypatch.setattr(verbs, "open_folder", open_and_retry)
    assert not job.delete(with_output=True, ended_before=before)
    done = job.wait(SECONDS, start_worker=False)
    assert (done.state, done.rows_done, done.rows_failed) == (JobState.COMPLETED, 3, 0)
    assert not job.delete(with_output=True, ended_before=before)
    assert len(job.results()) == 3


def test_what_to_delete_has_to_be_said(tmp_path, headrace):
    for text in ("soon", "0d", "-1h", "30", "2026-13-01"):
        assert_refused(headrace(tmp_path, "delete", "--ended-before", text), "--ended-before", "30d", text)
    for arguments in ([], ["job_x", "--ended-before", "30d"]):
        assert_refused(headrace(tmp_path, "delete", *arguments), "JOB", "--ended-before")


@pytest.mark.parametrize(("key", "is_kept"), [(None, False), ("batch/batch-1", True)])
def test_a_cancelled_job_has_no_spool_unless_a_batch_is_to_read_it(unserved, tmp_path, key, is_kept):
    unserved.ledger.batches.add(NewBatch("batch-1", "t", "/v1/completions", "file-in", "24h", 60.0))
    job = unserved.submit(ROWS, MODEL, tmp_path / "out", idempotency_key=key, **FAST)
    assert (unserved.jobs_folder / job.id).exists()
    job.cancel()
    assert (unserved.jobs_folder / job.id).exists() == is_kept


@pytest.mark.parametrize("by_command", [True, False])
def test_deleting_a_job_that_waits_removes_its_spool_and_its_workers_logs(unserved, headrace, tmp_path, by_command):
    job = unserved.submit(ROWS, MODEL, tmp_path / "out", **FAST)
    spool, log = unserved.jobs_folder / job.id, unserved.log_of(job.id)
    logs = [log, log_of_worker(log, 2), log_of_worker(log, 10)]
    assert spool.exists()
    log.parent.mkdir(exist_ok=True)
    for each in logs:
        each.touch()
    if by_command:
        assert headrace(tmp_path / "unserved", "delete", job.id).status == 0
    else:
        assert job.delete()
    assert not spool.exists()
    assert not any(each.exists() for each in logs)


def test_a_data_set_with_something_else_in_it_is_not_deleted(unserved, tmp_path, headrace):
    job = unserved.submit(ROWS, MODEL, tmp_path / "out", **FAST)
    (tmp_path / "out/mine.txt").write_text("keep")
    assert_refused(headrace(tmp_path / "unserved", "delete", job.id, "--output-too"), "mine.txt")
    assert (tmp_path / "out/mine.txt").read_text() == "keep"
    assert unserved.job(job.id).record.state is JobState.RUNNING


def test_http_clients_hold_up_jobs_too(unserved, tmp_path):
    job = unserved.submit(ROWS, MODEL, tmp_path / "out", **FAST)
    with TestClient(create_app(unserved, ServedModels.of([str(MODEL)]))) as http:
        for verb, state in (("pause", "paused"), ("resume", "running"), ("cancel", "cancelled")):
            answer = http.post(f"/jobs/{job.id}/{verb}")
            assert (answer.status_code, answer.json()["state"]) == (200, state)
        for verb in ("pause", "resume", "retry"):
            answer = http.post(f"/jobs/{job.id}/{verb}")
            assert (answer.status_code, answer.json()["error"]["code"]) == (409, "job_state")
            assert http.post(f"/jobs/job_x/{verb}").status_code == 404


@pytest.mark.parametrize("what", ["part", "spool"])
@pytest.mark.parametrize("harm", [Path.unlink, Path.touch], ids=["gone", "damaged"])
def test_http_clients_hear_why_failed_rows_cannot_be_tried_again(client, tmp_path, what, harm):
    job = client.submit(ROWS[:3], MODEL, tmp_path / "out", within_seconds=0.000001, **FAST)
    job.wait(SECONDS, start_worker=False)
    (file,) = {"part": tmp_path / "out", "spool": client.jobs_folder / job.id}[what].glob("*.parquet")
    file.unlink()
    if harm is Path.touch:
        file.touch()
    with TestClient(create_app(client, ServedModels.of([str(MODEL)]))) as http:
        answer = http.post(f"/jobs/{job.id}/retry")
        exported, page = (http.get(f"/jobs/{job.id}/results{ending}") for ending in (".parquet", ""))
    assert exported.status_code == (409 if what == "part" else 200)
    # Where it is gone, what is there can still be read.
    assert page.status_code == (409 if (what, harm) == ("part", Path.touch) else 200)
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "job_state")
    reason = "no failed row" if (what, harm) == ("spool", Path.unlink) else file.name
    assert reason in answer.json()["error"]["message"]
    is_to_be_resumed = (what, harm) == ("part", Path.unlink)
    assert answer.json()["error"]["message"].endswith("is gone: run --resume makes its rows again") == is_to_be_resumed
    assert job.progress().state is JobState.COMPLETED


def test_a_retry_that_cannot_be_noted_down_changes_nothing(client, tmp_path, wait_until):
    """The disk is full: what a file that is about to be replaced cannot be written beside, stands for that."""
    job = client.submit(ROWS[:3], MODEL, tmp_path / "out", within_seconds=0.000001, **FAST)
    job.wait(SECONDS, start_worker=False)
    in_the_way = tmp_path / "out" / "._headrace.json.tmp"

    def is_taken() -> bool:
        """The worker may be noting down that the job has ended, as its client does."""
        with suppress(FileExistsError):
            in_the_way.mkdir()
            return True
        return False

    wait_until(is_taken, "nobody else writes the report", SECONDS)
    with TestClient(create_app(client, ServedModels.of([str(MODEL)]))) as http:
        refused = http.post(f"/jobs/{job.id}/retry")
        assert (refused.status_code, refused.json()["error"]["code"]) == (507, "storage_full")
        assert job.progress().state is JobState.COMPLETED
        assert len(client.ledger.shards(job.id)) == 1
        in_the_way.rmdir()
        # The worker may be done with it before it is told of.
        assert http.post(f"/jobs/{job.id}/retry").json()["state"] in ("running", "completed")
        assert len(client.ledger.shards(job.id)) == 2


def test_a_data_set_that_a_disk_does_not_let_go_can_be_deleted_later(unserved, tmp_path):
    """What bears a part's name and is no file stands for a disk that refuses."""
    job = unserved.submit(ROWS[:1], MODEL, tmp_path / "out", **FAST)
    in_the_way, part = (tmp_path / "out" / part_file_name(job.id, 0, 1, sequence) for sequence in range(2))
    in_the_way.mkdir()
    part.touch()
    with TestClient(create_app(unserved, ServedModels.of([str(MODEL)]))) as http:
        refused = http.delete(f"/jobs/{job.id}", params={"output": True})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
        assert (refused.headers["Retry-After"], str(tmp_path) in refused.text) == ("5", False)
        in_the_way.rmdir()
        assert http.delete(f"/jobs/{job.id}", params={"output": True}).status_code == 200
    assert not (tmp_path / "out").exists()


def test_a_damaged_manifest_is_told_of_without_advice_that_no_request_can_follow(unserved, tmp_path):
    job = unserved.submit(ROWS[:1], MODEL, tmp_path / "out", **FAST)
    (tmp_path / "out" / "_headrace.json").write_text("{")
    with TestClient(create_app(unserved, ServedModels.of([str(MODEL)]))) as http:
        refused = http.delete(f"/jobs/{job.id}", params={"output": True})
    assert refused.status_code == 409
    assert refused.json()["error"]["message"].endswith("_headrace.json is damaged")


def test_http_clients_hear_that_a_job_is_of_a_later_version(unserved, tmp_path):
    """They are told by each face in its own way."""
    job = unserved.submit(ROWS[:1], MODEL, tmp_path / "out", **FAST)
    with unserved.ledger.database.write() as connection:
        connection.execute(update(jobs).values(spec={**job.spec.stored(), "beams": 4}))
    with TestClient(create_app(unserved, ServedModels.of([str(MODEL)]))) as http:
        assert http.get(f"/jobs/{job.id}").status_code == 200
        answer = http.get(f"/jobs/{job.id}/results.parquet")
    assert (answer.status_code, answer.json()["error"]["code"]) == (501, "later_version")
    assert "of a later headrace (beams: there is no such option)" in answer.json()["error"]["message"]
    with pytest.raises(LaterVersion) as refusal:
        _ = unserved.job(job.id).spec
    status = status_of(refusal.value)
    assert (status.code, status.trailing_metadata) == (StatusCode.UNIMPLEMENTED, (("error-code", "later_version"),))


def sink_rows(path: Path, table: str = "headrace_results") -> list[dict[str, Any]]:
    with closing(sqlite3.connect(path)) as database:
        database.row_factory = sqlite3.Row
        return [dict(row) for row in database.execute(f"select * from {table} order by job_id, row")]


def test_rows_go_to_a_table_too_and_a_retry_mends_them(served, headrace, few, tmp_path):
    sink = f"sqlite:///{tmp_path / 'answers.db'}"
    options = [*label_arguments(few, tmp_path / "out")[1:], "--sink", sink, "--sink-table", "labels"]
    job_id = submitted(headrace(served, "submit", *options, "--within", "0.000001s"))
    headrace(served, "watch", job_id)
    assert all(row["error"].startswith("expired") for row in sink_rows(tmp_path / "answers.db", "labels"))
    headrace(served, "retry", job_id)
    assert headrace(served, "watch", job_id).status == 0
    rows = sink_rows(tmp_path / "answers.db", "labels")
    stored = [json.loads(line) for line in headrace(served, "results", job_id).out.splitlines()]
    names = ("row", "custom_id", "text", "label", "confidence", "error", "prompt_tokens")
    assert [{name: row[name] for name in names} for row in rows] == [{n: row[n] for n in names} for row in stored]
    assert f"{tmp_path / 'answers.db'}, table labels" in headrace(served, "show", job_id).out


def test_a_sink_that_does_not_fit_is_refused_before_anything_is_queued(served, headrace, few, tmp_path):
    with closing(sqlite3.connect(tmp_path / "answers.db")) as database, database:
        database.execute("create table headrace_results (job_id text, row bigint, tag text)")
    jobs = listed_jobs(headrace(served, "jobs"))
    options = label_arguments(few, tmp_path / "out")
    result = headrace(served, *options, "--sink", f"sqlite:///{tmp_path / 'answers.db'}")
    assert_refused(result, "has no column 'attempt_id'")
    assert_refused(headrace(served, *options, "--sink", "mysql://host/name"), "--sink cannot be mysql")
    away = headrace(served, *options, "--sink", f"sqlite:///{tmp_path}/nowhere/answers.db")
    assert_refused(away, "unable to open database file")
    assert listed_jobs(headrace(served, "jobs")) == jobs
    assert not (tmp_path / "out").exists()
