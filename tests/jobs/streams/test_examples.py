"""The examples follow a stream as their readers would run them, while it is written."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote

import pytest
from redis import Redis

from headrace.jobs.streams.publisher import StreamPublisher

from .answers import answer_of, append, finish

FOLLOW = Path(__file__).parents[3] / "examples" / "streams" / "follow.py"
FOLLOW_IN_SHELL = FOLLOW.with_suffix(".sh")


def test_follow(url: str, redis: Redis, publisher: StreamPublisher, wait_until: Callable[..., None]) -> None:
    """Redis is emptied once it has read something."""
    answer = answer_of(60, seed=4)
    command = [sys.executable, str(FOLLOW), url, "job_a/3"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0) as process:
        publisher.open("job_a/3", 1)
        append(publisher, "job_a/3", answer, 0, 7)
        assert publisher.flush(30)
        reading = process.stdout.read(1)
        redis.flushall()
        for start in range(7, 60):
            append(publisher, "job_a/3", answer, start, start + 1)
        finish(publisher, "job_a/3", answer)
        out, err = process.communicate(timeout=60)
    assert (reading + out).decode() == answer.text + "\n"
    assert err.decode() == "stop\n"


def test_follow_from_a_token_on(url: str, publisher: StreamPublisher) -> None:
    answer = answer_of(60, seed=5)
    publisher.open("req_a", 1)
    append(publisher, "req_a", answer, 0, 60)
    finish(publisher, "req_a", answer)
    assert publisher.flush(30)
    done = subprocess.run(
        [sys.executable, str(FOLLOW), url, "req_a", "20"], capture_output=True, check=True, timeout=60
    )
    assert done.stdout.decode() == "".join(answer.texts[20:]) + answer.rest + "\n"


@pytest.mark.skipif(shutil.which("redis-cli") is None, reason="redis-cli is not installed")
def test_the_shell_follows_a_jobs_row(url: str, redis: Redis, publisher: StreamPublisher) -> None:
    answer = answer_of(5, seed=6)
    publisher.open("job_a/7", 1)
    append(publisher, "job_a/7", answer, 0, 5)
    finish(publisher, "job_a/7", answer)
    assert publisher.flush(30)
    command = [str(FOLLOW_IN_SHELL), "job_a/7", "0-0", "-s", unquote(url.removeprefix("unix://"))]
    done = subprocess.run(command, capture_output=True, check=True, timeout=60)
    tokens, end = (json.loads(line)["headrace:stream:job_a/7"][0] for line in done.stdout.splitlines())
    assert json.loads(dict(zip(tokens[1][::2], tokens[1][1::2], strict=True))["texts"]) == list(answer.texts)
    assert end[0] == "5-1"
    # Else no worker would write a bulk row's tokens.
    assert redis.zrange("headrace:watch:job_a", 0, -1) == ["7"]
