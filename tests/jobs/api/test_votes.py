"""Votes over HTTP and from Python, on the session's worker."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from headrace.jobs.client.client import Client

from ..running import LABELS, MODEL
from .conftest import ApiServer

ROWS = [{"text": "I was charged twice."}, {"text": "Where is my parcel?"}, {"text": "It does not work."}]
OPTIONS: dict[str, Any] = {"temperature": 1.5, "n": 5, "max_tokens": 3, "seed": 11}


def test_a_job_over_http(api: ApiServer, client: Client, wait_until_done: Callable[[str], dict[str, Any]], tmp_path):
    asked: dict[str, Any] = {"model": api.model, "rows": ROWS, "prompt": "{text}", "sampling": OPTIONS}
    job = api.post("/jobs", **asked, vote=True)
    wait_until_done(job["id"])
    rows = api.get(f"/jobs/{job['id']}/results")["data"]
    plain = client.submit(ROWS, MODEL, tmp_path / "plain", prompt="{text}", **OPTIONS)
    plain.wait(60, start_worker=False)
    for row, said in zip(rows, plain.results()["outputs"].to_pylist(), strict=True):
        assert row["outputs"] == said[: len(row["outputs"])]
        assert row["votes"][0]["count"] == max(Counter(map(str.strip, row["outputs"])).values())
        assert 0 < row["agreement"] <= 1
        assert row["receipt"]["seed"] is not None


def test_a_labelling_job_from_python(client: Client, tmp_path):
    job = client.submit(ROWS, MODEL, tmp_path / "out", prompt="{text}", choices=LABELS, vote=True, **OPTIONS)
    job.wait(60, start_worker=False)
    for row in job.results().to_pylist():
        assert len(row["outputs"]) == sum(vote["count"] for vote in row["votes"]) == 5
        assert row["label"] == row["votes"][0]["answer"]


def test_a_vote_on_one_answer_is_refused(api: ApiServer):
    response = api.http.post("/jobs", json={"model": api.model, "rows": ROWS, "prompt": "{text}", "vote": True})
    assert response.status_code == 422
    error = response.json()["error"]
    assert error["param"] == "vote"
    assert "give n, and a temperature above 0" in error["message"]
