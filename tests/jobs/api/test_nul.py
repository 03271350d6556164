"""A NUL where no database takes one: named as the field at fault, whichever ledger there is."""

from typing import Any

import pytest

from .own_server import JOB, Server, assert_error

NUL = "a\0b"
PATHS = {
    "/v1/files/a%00b": "file_id",
    "/v1/files/a%00b/content": "file_id",
    "/v1/files?after=a%00b": "after",
    "/v1/files?purpose=a%00b": "purpose",
    "/v1/batches/a%00b": "batch_id",
    "/v1/batches/a%00b/webhooks": "batch_id",
    "/v1/batches?after=a%00b": "after",
}
BATCHES: dict[str, tuple[dict[str, Any], str]] = {
    "file": ({"input_file_id": NUL}, "input_file_id"),
    "metadata": ({"metadata": {"team": NUL}}, "metadata.team"),
    "webhook": ({"webhook": {"url": "https://example.com/", "secret": NUL}}, "webhook.secret"),
}
JOBS: dict[str, tuple[dict[str, Any], str]] = {
    "file": ({"rows": None, "input_file_id": NUL}, "input_file_id"),
    "url": ({"rows": None, "input_url": f"https://example.com/{NUL}"}, "input_url"),
    "webhook": ({"webhook": {"url": "https://example.com/", "secret": NUL}}, "webhook.secret"),
    "sink": ({"sink": {"url": "sqlite:////tmp/rows.db", "table": NUL}}, "sink.table"),
}


@pytest.mark.parametrize(("path", "param"), PATHS.items())
def test_in_a_path_or_a_query(server: Server, path: str, param: str) -> None:
    assert_error(server.http.get(path), 400, "invalid_value", param)


@pytest.mark.parametrize(("changes", "param"), BATCHES.values(), ids=BATCHES)
def test_in_a_batch(server: Server, changes: dict[str, Any], param: str) -> None:
    batch = {"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h"}
    assert_error(server.http.post("/v1/batches", json=batch | changes), 400, "invalid_value", param)


@pytest.mark.parametrize(("changes", "param"), JOBS.values(), ids=JOBS)
def test_in_a_job(server: Server, changes: dict[str, Any], param: str) -> None:
    assert_error(server.http.post("/jobs", json=JOB | changes), 422, "invalid_value", param)
