"""The health check of the worker's container, against a real Valkey."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.jobs.embedded.valkey import EmbeddedValkey
from headrace.jobs.workers import presence as presence_module
from headrace.jobs.workers.presence import WorkerId, WorkerPresence

SCRIPT = Path(__file__).parents[2] / "deploy/worker_health.py"
QUEUE = "headrace.bulk.0123456789ab"


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory) -> Iterator[str]:
    with EmbeddedValkey(tmp_path_factory.mktemp("data")) as valkey:
        yield valkey.url


@pytest.fixture
def presence(redis_url, monkeypatch) -> Iterator[WorkerPresence]:
    """Who is announced is believed for longer than a check takes to start on a busy machine."""
    monkeypatch.setattr(presence_module, "TTL_SECONDS", 600.0)
    with WorkerPresence(redis_url) as presence:
        yield presence


def check(redis_url: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HEADRACE_REDIS_URL": redis_url}
    return subprocess.run([sys.executable, SCRIPT], env=environment, capture_output=True, text=True, check=False)


def test_healthy_from_the_worker_is_there_until_it_leaves(redis_url, presence):
    worker = WorkerId.own()
    before = check(redis_url)
    assert (before.returncode, before.stderr) == (1, "no worker of this host is alive\n")
    presence.announce(QUEUE, worker)
    assert check(redis_url).returncode == 0
    presence.withdraw(QUEUE, worker)
    assert check(redis_url).returncode == 1


def test_the_worker_of_another_host_does_not_count(redis_url, presence):
    elsewhere = replace(WorkerId.own(), host="elsewhere")
    presence.announce(QUEUE, elsewhere)
    assert presence.hosts() == {"elsewhere"}
    assert check(redis_url).returncode == 1
    presence.withdraw(QUEUE, elsewhere)


def test_unhealthy_without_redis(tmp_path):
    assert check(f"unix://{tmp_path}/nothing.sock").returncode == 1
