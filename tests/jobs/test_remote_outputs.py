"""Jobs that write to an object store, as their users see them: by command, from Python and over HTTP."""

import io
import json
import uuid
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fastapi.testclient import TestClient

from headrace.jobs.api.app import create_app
from headrace.jobs.api.models import ServedModels
from headrace.jobs.client.client import Client
from headrace.jobs.settings import Settings
from headrace.storage.errors import StorageError
from headrace.storage.ledger.records import JobState
from headrace.storage.output.address import open_folder
from headrace.storage.output.manifest import read_report

from ..shelf import READ_ONLY, Shelf, keys, make_bucket
from .running import LABELS, MODEL, Result, environment, label_arguments


@pytest.fixture
def store(served, shelf, monkeypatch) -> str:
    """The URL of a bucket that this process and the worker share."""
    monkeypatch.setenv("SHELF_ROOT", str(served / "shelf"))
    # Not numbered by what is there: the worker may be writing a file beside the buckets.
    name = f"bucket-{uuid.uuid4().hex}"
    make_bucket(name)
    return f"shelf://{name}"


@pytest.fixture
def run(served, headrace, tickets, tmp_path, store, wait_until) -> Callable[..., Result]:
    """The demo's command for a dozen of tickets; when it has succeeded, the worker has tidied up too."""
    few = tmp_path / "few.jsonl"
    few.write_text("".join(tickets.read_text().splitlines(keepends=True)[:12]))

    def run(output: str, *more: str) -> Result:
        result: Result = headrace(served, *label_arguments(few, Path("OUTPUT"))[:-1], output, *more)
        if result.status == 0:
            folder = open_folder(output)
            wait_until(lambda: "state" in (read_report(folder) or {}), "the manifest says how the job went")
        return result

    return run


def objects(store: str) -> list[str]:
    return keys(store.removeprefix("shelf://"))


def test_a_run_its_results_and_its_end(served, headrace, run, store):
    done = run(f"{store}/a/labels/")
    assert done.status == 0, done.err
    assert f"output      {store}/a/labels\n" in done.out
    job_id = done.out.split()[1]
    names = objects(store)
    assert names[0] == "a/labels/_headrace.json"
    assert names[1:]
    assert all(name.startswith("a/labels/part-") for name in names[1:])
    rows = [json.loads(line) for line in headrace(served, "results", job_id).out.splitlines()]
    assert [row["row"] for row in rows] == list(range(12))
    assert all(row["label"] in LABELS for row in rows)
    assert f"{store}/a/labels" in headrace(served, "show", job_id).out

    refused = run(f"{store}/a/labels")
    assert refused.status == 2
    assert "is not empty: pass --resume to finish it or --overwrite to replace it" in refused.err
    resumed = run(f"{store}/a/labels", "--resume")
    assert "12 of 12: 0 generated, 12 kept from before, 0 failed" in resumed.out
    replaced = run(f"{store}/a/labels", "--overwrite", "--limit", "4")
    assert "4 of 4: 4 generated, 0 kept from before" in replaced.out
    assert not set(names[1:]) & set(objects(store))

    job_id = replaced.out.split()[1]
    assert headrace(served, "delete", job_id, "--output-too").status == 0
    assert objects(store) == []


def test_what_was_not_committed_is_not_read_and_goes_when_the_job_is_resumed(served, headrace, run, store):
    """As the one who completed the job leaves it, when it is killed before it tidies up."""
    job_id = run(f"{store}/labels").out.split()[1]
    before = objects(store)
    folder = open_folder(f"{store}/labels")
    folder.write_part("part-00000-00-000.parquet", folder.read_part(folder.part_names()[0]))
    assert len(headrace(served, "results", job_id).out.splitlines()) == 12
    verified = headrace(served, "verify", f"{store}/labels", "--rows", "1", "--json")
    assert json.loads(verified.out)["rows"]["generated"]["rows"] == 12
    assert run(f"{store}/labels", "--resume").status == 0
    assert objects(store) == before


def test_rows_are_verified_by_job_and_by_url(served, headrace, run, store):
    job_id = run(f"{store}/labels").out.split()[1]
    for name in (job_id, f"{store}/labels"):
        result = headrace(served, "verify", name, "--rows", "3", "--json")
        assert result.status == 0, result.err
        said = json.loads(result.out)
        assert (said["output"], said["differences"]) == (f"{store}/labels", [])
        assert said["rows"]["generated"] == {"rows": 12, "verified": 3, "equal": 3, "different": 0}
    nothing = headrace(served, "verify", f"{store}/other")
    assert nothing.status == 2
    assert f"folder {store}/other holds no data set" in nothing.err


def test_the_data_set_of_a_deleted_job_is_not_resumed_but_can_be_verified(served, headrace, run, store, tmp_path):
    assert run(f"{store}/labels").status == 0
    job_id = json.loads((served / "shelf" / store.removeprefix("shelf://") / "labels%2F_headrace.json").read_text())
    with Client(Settings.from_environment(environment(served))) as client:
        client.job(job_id["job_id"]).delete()
    resumed = run(f"{store}/labels", "--resume")
    assert (resumed.status, "was deleted: pass --overwrite" in resumed.err) == (2, True)
    assert headrace(served, "verify", f"{store}/labels", "--rows", "2").status == 0


def test_a_job_from_python_is_read_over_http(client, store):
    rows = [{"text": f"Where is parcel {number}?"} for number in range(5)]
    job = client.submit(rows, MODEL, f"{store}/out", prompt="{text}", choices=LABELS)
    job.wait(120, start_worker=False)
    table = job.results()
    assert table["row"].to_pylist() == list(range(5))
    with TestClient(create_app(client, ServedModels.of([str(MODEL)]))) as http:
        page = http.get(f"/jobs/{job.id}/results").json()
        assert [row["label"] for row in page["data"]] == table["label"].to_pylist()
        file = http.get(f"/jobs/{job.id}/results.parquet")
        assert pq.read_table(io.BytesIO(file.content)).sort_by("row")["label"] == table["label"]
        with http.stream("GET", f"/jobs/{job.id}/rows/3/stream") as events:
            assert table["output"].to_pylist()[3] in "".join(events.iter_text())


def test_http_clients_hear_that_a_store_is_away(client, store, monkeypatch):
    rows = [{"text": "Where is my parcel?"}]
    terms = {"prompt": "{text}", "choices": LABELS, "within_seconds": 0.000001}
    job = client.submit(rows, MODEL, f"{store}/out", **terms)
    job.wait(120, start_worker=False)

    def time_out(*args: object, **options: object) -> None:
        raise TimeoutError("timed out")

    with TestClient(create_app(client, ServedModels.of([str(MODEL)]))) as http, monkeypatch.context() as away:
        for name in ("ls", "cat_file", "pipe_file", "rm_file"):
            away.setattr(Shelf, name, time_out)
        asked = ("POST", "/retry"), ("GET", "/results"), ("GET", "/results.jsonl"), ("DELETE", "?output=1")
        for method, path in asked:
            answer = http.request(method, f"/jobs/{job.id}{path}")
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], answer.headers["Retry-After"]) == (503, "unavailable", "5"), path
            assert error["message"] == "the store of the job's output does not answer: try again later"
    assert job.progress().state is JobState.COMPLETED


def test_where_nothing_can_be_written_no_job_is_made(client, store):
    make_bucket(READ_ONLY)
    before = [job.id for job in client.jobs()]
    for url, reason in ((f"shelf://{READ_ONLY}/out", "Access Denied"), ("shelf://nowhere/out", "does not exist")):
        with pytest.raises(StorageError, match=f"cannot write to output {url}: .*{reason}"):
            client.submit([{"text": "Hello"}], MODEL, url, prompt="{text}", choices=LABELS)
    assert [job.id for job in client.jobs()] == before
    assert keys(READ_ONLY) == []


def test_a_file_url_is_a_folder_of_this_host(client, tmp_path):
    job = client.submit([{"text": "Hello"}], MODEL, f"file://{tmp_path}/out", prompt="{text}", choices=LABELS)
    job.wait(120, start_worker=False)
    assert job.record.output_dir == str(tmp_path / "out")
    assert pa.concat_tables(map(pq.read_table, (tmp_path / "out").glob("*.parquet"))).num_rows == 1
