"""The pages for people at `/` and `/docs`, and what the first one reads."""

import hashlib
import re
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from headrace.jobs.client.client import Client

from ..running import LABELS, MODEL
from .conftest import ApiServer
from .in_process import in_process_server


def workers_of(status: dict[str, Any]) -> list[dict[str, Any]]:
    """Those of the one model that is served: other tests may have had workers for others a moment ago."""
    (model,) = status["models"]
    return [worker for worker in status["workers"] if worker["queue"] == model["queue"]]


def test_what_runs_here(api: ApiServer, wait_until: Callable[..., None]) -> None:
    answers: list[dict[str, Any]] = []

    def tells_of_the_worker() -> bool:
        answers.append(api.get("/status"))
        return any(worker["engine"] for worker in workers_of(answers[-1]))

    # It says once a second that it is there, if nothing keeps it from that.
    wait_until(tells_of_the_worker, "the worker is there")
    (model,), (worker,) = answers[-1]["models"], workers_of(answers[-1])
    assert (model["name"], model["waiting_requests"]) == (MODEL.name, 0)
    assert worker["engine"]["num_blocks"] > 0


def test_what_waits(unserved: Client, tmp_path: Path) -> None:
    rows = [{"text": "Where is my parcel?"}] * 3
    job = unserved.submit(rows, MODEL, tmp_path / "out", dtype="float16", prompt="{text}", choices=LABELS)
    with in_process_server(unserved) as server:
        found = httpx2.get(f"{server.url}/status", timeout=60).raise_for_status().json()
    (queue,) = found["queues"]
    assert (queue["queue"], queue["model"]) == (job.record.queue, MODEL.name)
    assert (queue["dtype"], queue["quantization"], queue["kv_cache_dtype"]) == ("float16", None, "auto")
    assert (queue["waiting_rows"], queue["waiting_shards"], queue["running_shards"]) == (3, 1, 0)
    assert found["workers"] == []


def test_the_page_needs_no_key_and_holds_nothing_that_does(unserved: Client, tmp_path: Path) -> None:
    unserved.ledger.api_keys.create("jo")
    unserved.submit([{"text": "It is late."}], MODEL, tmp_path / "out", prompt="{text}", choices=LABELS)
    with in_process_server(unserved) as server:
        page, status = (httpx2.get(f"{server.url}{path}", timeout=60) for path in ("/", "/status"))
        docs = httpx2.get(f"{server.url}/docs", timeout=60)
    assert (page.status_code, docs.status_code, status.status_code) == (200, 200, 401)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert unserved.jobs(1)[0].id not in page.text


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_the_page_asks_nobody_else(api: ApiServer, path: str) -> None:
    """What it runs is in it and named in its policy, so that a browser runs nothing else."""
    page = api.http.get(path)
    policy = page.headers["content-security-policy"]
    (script,) = re.findall("<script>(.*?)</script>", page.text, re.DOTALL)
    assert f"script-src 'sha256-{b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" in policy
    assert "default-src 'none'" in policy
    assert "//" not in re.sub(r"^\s*//.*$", "", page.text, flags=re.MULTILINE)
