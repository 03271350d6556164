"""The Python of docs/api.md does what it says, against the session's server."""

import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from headrace.jobs.outside.webhooks import event_body, event_headers
from headrace.storage.ledger.webhooks import Delivery

from ..running import ROOT
from .conftest import ApiServer

PAGE = (ROOT / "docs/api.md").read_text()


def block(language: str, mark: str) -> str:
    """The one piece of the page in a language that has this in it."""
    [found] = [code for code in re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL) if mark in code]
    return str(found)


@pytest.mark.parametrize(
    ("mark", "expected"),
    [
        ("from openai import", ("product\nproduct\ncompleted 2 of 2\n",)),
        ("import grpc", ("product stop 2\n", "first: 2\n", "INVALID_ARGUMENT temperature temperature must be ≥ 0")),
    ],
    ids=["openai", "grpc"],
)
def test_a_client_prints_what_the_page_shows(
    api: ApiServer, tmp_path: Path, mark: str, expected: tuple[str, ...]
) -> None:
    (tmp_path / "requests.jsonl").write_text(block("json", '"custom_id": "b"'))
    code = block("python", mark).replace("http://localhost:8000", api.url).replace("localhost:50051", api.grpc)
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    for words in expected:
        assert words in done.stdout
        assert words in PAGE


def test_a_receiver_knows_our_webhooks() -> None:
    names: dict[str, Any] = {}
    exec(block("python", "def is_ours"), names)
    delivery = Delivery(
        id=1,
        num_attempts=1,
        event_id="evt_1",
        event_type="job.completed",
        event_at=time.time(),
        subject_id="job_1",
        url="http://127.0.0.1:9000/",
        secret=names["SECRET"],
    )
    body = event_body(delivery)
    headers = event_headers(delivery, body, int(time.time()))
    assert names["is_ours"](headers, body)
    assert not names["is_ours"](headers, body + b" ")
    assert not names["is_ours"](event_headers(delivery, body, int(time.time()) - 600), body)
