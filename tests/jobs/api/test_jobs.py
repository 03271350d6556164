"""Our own routes: where a job's rows come from, what can be done with it, and its results as files."""

import gzip
import io
import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pandas as pd
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest

from ...duck import read_by_duckdb
from .conftest import ApiServer
from .receiver import Receiver, receiving

ROWS = [{"custom_id": f"t{number}", "text": f"Where is parcel {number}?"} for number in range(40)]
OPTIONS: dict[str, Any] = {"model": "model", "prompt": "{text}", "choices": ["billing", "shipping"]}


@pytest.fixture(scope="module")
def files() -> Iterator[Receiver]:
    with receiving() as receiver:
        lines = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
        table = io.BytesIO()
        pq.write_table(pa.Table.from_pylist(ROWS), table)
        receiver.files |= {"/a.jsonl": lines, "/b.jsonl.gz": gzip.compress(lines), "/c": lines}
        receiver.files |= {"/d.parquet": table.getvalue(), "/e.jsonl": b"", "/f.csv": b"text\nhello\n"}
        receiver.redirects |= {"/r.jsonl": "/a.jsonl"}
        yield receiver


@pytest.fixture(scope="module")
def done(api: ApiServer, wait_until_done: Callable[[str], dict[str, Any]]) -> str:
    """A job that has completed."""
    job = api.post("/jobs", **OPTIONS, rows=ROWS)
    assert wait_until_done(job["id"])["rows"] == {"total": 40, "done": 40, "failed": 0, "from_cache": 0, "truncated": 0}
    return job["id"]


def refused(response: httpx2.Response, status: int, param: str | None) -> str:
    assert (response.status_code, response.json()["error"]["param"]) == (status, param), response.text
    return response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "input_format"),
    [("/a.jsonl", None), ("/b.jsonl.gz", None), ("/c", "jsonl"), ("/d.parquet", None), ("/a.jsonl?signed=1", None)],
)
def test_rows_at_a_url(api: ApiServer, files: Receiver, path: str, input_format: str | None) -> None:
    files.files["/a.jsonl?signed=1"] = files.files["/a.jsonl"]
    job = api.post("/jobs", **OPTIONS, input_url=f"{files.url}{path}", input_format=input_format, limit=30)
    assert job["rows"]["total"] == 30
    api.http.post(f"/jobs/{job['id']}/cancel").raise_for_status()


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "/etc/passwd",
        "http://example.com/a.jsonl",
        "http://127.0.0.1:1@example.com/a.jsonl",
        "memory://a/../../b.jsonl",
        "memory://a.jsonl::file:///etc/passwd",
        "http://127.0.0.1:1/\r\nHost: x",
        "http://127.0.0.1:99999999/",
    ],
)
def test_a_url_that_is_not_allowed(api: ApiServer, url: str) -> None:
    refused(api.http.post("/jobs", json={**OPTIONS, "input_url": url}), 422, "input_url")


@pytest.mark.parametrize("path", ["/missing.jsonl", "/e.jsonl", "/c", "/r.jsonl"])
def test_a_url_with_nothing_to_read(api: ApiServer, files: Receiver, path: str) -> None:
    message = refused(api.http.post("/jobs", json={**OPTIONS, "input_url": files.url + path}), 422, "input_url")
    assert str(api.data_dir) not in message
    assert not list((api.data_dir / "inputs").glob("*"))


def test_a_file_with_the_request(api: ApiServer, wait_until_done: Callable[[str], dict[str, Any]]) -> None:
    frame = pd.DataFrame(ROWS).to_csv(index=False)
    form: dict[str, Any] = {"data": {"job": json.dumps(OPTIONS)}, "files": {"file": ("tickets.csv", frame)}}
    job = api.http.post("/jobs/upload", **form).raise_for_status().json()
    wait_until_done(job["id"])
    page = api.get(f"/jobs/{job['id']}/results", limit=2)
    assert [row["custom_id"] for row in page["data"]] == ["t0", "t1"]
    assert not list((api.data_dir / "inputs").glob("*"))


def test_a_file_uploaded_before(api: ApiServer, wait_until_done: Callable[[str], dict[str, Any]]) -> None:
    lines = "".join(json.dumps(row) + "\n" for row in ROWS[:5])
    form: dict[str, Any] = {"data": {"purpose": "batch"}, "files": {"file": ("tickets.jsonl", lines)}}
    file_id = api.http.post("/v1/files", **form).raise_for_status().json()["id"]
    job = api.post("/jobs", **OPTIONS, input_file_id=file_id)
    assert wait_until_done(job["id"])["rows"] == {"total": 5, "done": 5, "failed": 0, "from_cache": 0, "truncated": 0}
    refused(api.http.post("/jobs", json={**OPTIONS, "input_file_id": "file-none"}), 404, "input_file_id")
    refused(api.http.post("/jobs", json={**OPTIONS, "input_file_id": "../../x"}), 404, "input_file_id")


@pytest.mark.parametrize(
    ("job", "name", "status", "param"),
    [
        ("{", "a.csv", 400, "job"),
        (json.dumps({**OPTIONS, "rows": []}), "a.csv", 422, "rows"),
        (json.dumps({**OPTIONS, "model": "other"}), "a.csv", 404, "model"),
        (json.dumps(OPTIONS), "../../a.exe", 422, "file"),
        ("[]", "a.csv", 422, "job"),
        (json.dumps({**OPTIONS, "input_format": "exe"}), "a.csv", 422, "input_format"),
    ],
)
def test_a_file_that_is_refused(api: ApiServer, job: str, name: str, status: int, param: str | None) -> None:
    response = api.http.post("/jobs/upload", data={"job": job}, files={"file": (name, b"text\nhello\n")})
    assert str(api.data_dir) not in refused(response, status, param)


def test_options_that_are_refused(api: ApiServer) -> None:
    def refuse(param: str | None, **changes: Any) -> None:
        refused(api.http.post("/jobs", json={**OPTIONS, "rows": ROWS, **changes}), 422, param)

    refuse("rows", input_url="http://127.0.0.1:1/a.jsonl")
    refuse("within_seconds", within_seconds=0)
    refuse("priority", priority=10_000)
    refuse("limit", limit=0)
    refuse("webhook.url", webhook={"url": "file:///etc"})
    refuse("webhook.secret", webhook={"url": "http://a", "secret": "whsec_!"})
    refuse("sink.url", sink={"url": "sqlite:////etc/passwd"})
    refuse("sink.url", sink={"url": "postgresql://user:secret@127.0.0.1/db"})


def test_jobs_page_by_page(api: ApiServer, done: str) -> None:
    ids = [api.post("/jobs", **OPTIONS, rows=ROWS[:1])["id"] for _ in range(3)]
    first = api.get("/jobs", limit=2)
    assert ([job["id"] for job in first["data"]], first["last_id"], first["has_more"]) == (ids[:0:-1], ids[1], True)
    second = api.get("/jobs", limit=2, after=first["last_id"])
    assert second["data"][0]["id"] == ids[0]
    listed, page = [], api.get("/jobs", limit=1)
    while page["data"]:
        listed += [job["id"] for job in page["data"]]
        page = api.get("/jobs", limit=7, after=page["last_id"])
    assert len(listed) == len(set(listed))
    assert {done, *ids} <= set(listed)
    assert not page["has_more"]


def test_jobs_of_one_state(api: ApiServer, done: str) -> None:
    job_id = api.post("/jobs", **OPTIONS, rows=ROWS[:1])["id"]
    api.http.post(f"/jobs/{job_id}/cancel").raise_for_status()
    states = {job["state"] for job in api.get("/jobs", state="completed", limit=100)["data"]}
    assert states == {"completed"}
    assert done in {job["id"] for job in api.get("/jobs", state="completed", limit=100)["data"]}


@pytest.mark.parametrize("after", ["job_none", "../x", "a\r\nb", "%00", ""])
def test_a_cursor_that_is_none(api: ApiServer, after: str) -> None:
    refused(api.http.get("/jobs", params={"after": after}), 400, "after")


def test_a_job_goes_with_its_results(api: ApiServer, wait_until_done: Callable[[str], dict[str, Any]]) -> None:
    kept, removed = (api.post("/jobs", **OPTIONS, rows=ROWS[:1])["id"] for _ in range(2))
    for job_id, output in ((kept, False), (removed, True)):
        wait_until_done(job_id)
        gone = api.http.delete(f"/jobs/{job_id}", params={"output": output}).raise_for_status().json()
        assert gone == {"id": job_id, "object": "job", "deleted": True}
        assert (api.data_dir / "outputs" / job_id).exists() is not output
        refused(api.http.get(f"/jobs/{job_id}"), 404, "job_id")
        refused(api.http.delete(f"/jobs/{job_id}"), 404, "job_id")


def test_priority(api: ApiServer, done: str) -> None:
    job_id = api.post("/jobs", **{**OPTIONS, "model": "model"}, rows=ROWS[:1], priority=3, within_seconds=60)["id"]
    job = api.get(f"/jobs/{job_id}")
    assert job["priority"] == 3
    assert job["deadline_at"] == pytest.approx(job["created_at"] + 60, abs=5)
    refused(api.http.post(f"/jobs/{done}/priority", json={"priority": 1}), 409, "job_id")
    refused(api.http.post(f"/jobs/{done}/priority", json={"priority": "x"}), 422, "priority")
    refused(api.http.post("/jobs/job_none/priority", json={"priority": 1}), 404, "job_id")


def test_a_job_that_nobody_serves_says_so(api: ApiServer, done: str) -> None:
    """Its model has a worker, of another precision."""
    rows = [{"text": f"Where is parcel {number}?"} for number in range(2000)]
    served, waiting = (api.post("/jobs", **OPTIONS, rows=rows, **more) for more in ({}, {"dtype": "float16"}))
    assert (served["workers"], waiting["workers"]) == (1, 0)
    listed = {job["id"]: job["workers"] for job in api.get("/jobs", limit=100)["data"]}
    assert (listed[waiting["id"]], listed[done]) == (0, None)
    for job in (served, waiting):
        api.http.post(f"/jobs/{job['id']}/cancel").raise_for_status()


def test_answers_of_an_earlier_job_are_taken_on_request(
    api: ApiServer, wait_until_done: Callable[[str], dict[str, Any]]
) -> None:
    jobs = [api.post("/jobs", **OPTIONS, rows=ROWS[:3], cache=cache)["id"] for cache in (True, False)]
    assert [wait_until_done(job_id)["rows"]["from_cache"] for job_id in jobs] == [0, 0]
    again = api.post("/jobs", **OPTIONS, rows=ROWS[:3], cache=True)["id"]
    assert wait_until_done(again)["rows"] == {"total": 3, "done": 3, "failed": 0, "from_cache": 3, "truncated": 0}


def test_progress_of_a_job_that_has_ended(api: ApiServer, done: str) -> None:
    job = api.get(f"/jobs/{done}")
    assert job["eta_seconds"] is None
    assert job["rows_per_second"] == pytest.approx(40 / (job["finished_at"] - job["started_at"]), rel=1e-2)
    assert 0 <= job["tokens"]["cached_share"] <= 1


def test_results_as_files(api: ApiServer, done: str, tmp_path: Path) -> None:
    """Each read by those who will read them."""
    pages = api.get(f"/jobs/{done}/results", limit=1000)["data"]
    labels = {row["custom_id"]: row["label"] for row in pages}
    assert len(labels) == 40
    for ending in ("parquet", "jsonl"):
        response = api.http.get(f"/jobs/{done}/results.{ending}").raise_for_status()
        assert response.headers["content-disposition"] == f'attachment; filename="{done}.{ending}"'
        path = tmp_path / f"results.{ending}"
        path.write_bytes(response.content)
        assert dict(read_by_duckdb(f"select custom_id, label from '{path}'")) == labels
    assert dict(pd.read_parquet(tmp_path / "results.parquet")[["custom_id", "label"]].to_numpy()) == labels
    stream = api.http.get(f"/jobs/{done}/results.arrow").raise_for_status()
    assert stream.headers["content-type"] == "application/vnd.apache.arrow.stream"
    table = pa.ipc.open_stream(stream.content).read_all()
    assert dict(zip(table["custom_id"].to_pylist(), table["label"].to_pylist(), strict=True)) == labels
    asked = api.http.get(f"/jobs/{done}/results", headers={"Accept": "application/vnd.apache.parquet"})
    assert pq.read_table(io.BytesIO(asked.content)).num_rows == 40
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert sorted(lines, key=lambda row: row["row"]) == pages
    refused(api.http.get("/jobs/job_none/results.parquet"), 404, "job_id")


@pytest.mark.parametrize(
    "path", ["/jobs/..%2f..%2fetc", "/jobs/%2e%2e/results", "/jobs/a%0d%0ab", "/jobs/a%2fb/cancel"]
)
def test_ids_that_are_paths(api: ApiServer, path: str) -> None:
    response = api.http.get(path)
    assert response.status_code in (404, 405)
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_a_header_can_not_be_smuggled_in(api: ApiServer) -> None:
    """Through a file's name, an id or a key: nothing of a request comes back as a header."""
    with socket.create_connection((api.http.base_url.host, api.http.base_url.port), 60) as raw:
        raw.sendall(
            b"GET /jobs/a%0d%0aX-Evil:%201/results.parquet HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        )
        answer = b"".join(iter(lambda: raw.recv(65536), b""))
    assert b"404" in answer.splitlines()[0]
    assert b"x-evil" not in answer.partition(b"\r\n\r\n")[0].lower()


def test_ratings_are_labels(api: ApiServer, wait_until_done: Callable[[str], dict[str, Any]]) -> None:
    job = api.post("/jobs", **OPTIONS | {"choices": [1, 2, 3]}, rows=ROWS[:1])
    assert wait_until_done(job["id"])["rows"]["failed"] == 0
    [row] = api.get(f"/jobs/{job['id']}/results")["data"]
    assert list(row["probabilities"]) == ["1", "2", "3"]
