"""Which workers are alive, as a real Redis tells it."""

import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
from redis import Redis
from redis.exceptions import RedisError

from headrace.engine.checkpoints.hub import locate_model
from headrace.engine.config import EngineConfig
from headrace.engine.errors import ModelError
from headrace.jobs.embedded.valkey import EmbeddedValkey
from headrace.jobs.settings import Settings
from headrace.jobs.workers import presence as presence_module
from headrace.jobs.workers.presence import WorkerId, WorkerPresence
from headrace.jobs.workers.worker import WorkerOptions, serve

from ..running import MODEL

QUEUE = "headrace.bulk.0123456789ab"


@pytest.fixture(scope="module")
def valkey(tmp_path_factory) -> Iterator[EmbeddedValkey]:
    with EmbeddedValkey(tmp_path_factory.mktemp("valkey")) as valkey:
        yield valkey


@pytest.fixture
def presence(valkey, monkeypatch) -> Iterator[WorkerPresence]:
    """In which nobody falls silent by itself, however long a test takes."""
    monkeypatch.setattr(presence_module, "TTL_SECONDS", 600.0)
    with Redis.from_url(valkey.url) as redis:
        redis.flushall()
    with WorkerPresence(valkey.url) as presence:
        yield presence


@pytest.fixture(scope="module")
def dead_pid() -> int:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


def test_a_workers_name_can_be_read_back():
    worker = WorkerId("host.with:colons", 7, "abc")
    assert WorkerId.parse(str(worker)) == worker
    assert WorkerId.own() != WorkerId.own()


def test_a_worker_of_another_ledger_does_not_serve_a_job(presence, valkey):
    """Where two share a Redis its queue is the same: who waited for that worker would do so for good."""
    presence.announce(QUEUE, WorkerId.own("1f" * 16))
    with WorkerPresence(valkey.url, "1f" * 16) as own, WorkerPresence(valkey.url, "2f" * 16) as others:
        assert (own.is_served(QUEUE), others.is_served(QUEUE), presence.is_served(QUEUE)) == (True, False, True)
        assert (own.num_workers([QUEUE]), others.num_workers([QUEUE])) == ({QUEUE: 1}, {QUEUE: 0})
        assert not others.is_alive_here(QUEUE)
        # One of before does not say whose jobs it answers.
        presence.announce(QUEUE, WorkerId.own())
        assert others.is_served(QUEUE)


def test_a_model_is_loaded_for_as_long_as_its_loader_lives(presence, dead_pid):
    assert not presence.is_loading(QUEUE)
    presence.announce_loading(QUEUE, WorkerId.own())
    assert presence.is_loading(QUEUE)
    assert not presence.is_loading("another")
    assert not presence.is_served(QUEUE)
    presence.announce_loading(QUEUE, WorkerId(socket.gethostname(), dead_pid, "x"))
    assert not presence.is_loading(QUEUE)


def test_a_worker_says_that_it_loads_before_it_does(presence, valkey, tmp_path):
    settings = Settings.from_environment({"HEADRACE_DATA_DIR": str(tmp_path), "HEADRACE_REDIS_URL": valkey.url})
    options = WorkerOptions(locate_model(str(MODEL), None), EngineConfig(), concurrency=1)
    said = []

    def load(*_: object):
        said.append(presence.is_loading(options.queue))
        raise ModelError("asked for by the test")

    with pytest.raises(ModelError, match="asked for"):
        serve(settings, options, load)
    assert said == [True]


def test_a_queue_is_served_from_the_announcement_to_the_withdrawal(presence):
    worker, other = WorkerId.own(), WorkerId.own()
    assert not presence.is_served(QUEUE)
    presence.announce(QUEUE, worker)
    presence.announce(QUEUE, other)
    assert presence.is_served(QUEUE)
    assert not presence.is_served("another")
    presence.withdraw(QUEUE, worker)
    assert presence.is_served(QUEUE)
    presence.withdraw(QUEUE, other)
    assert not presence.is_served(QUEUE)


def test_a_worker_that_is_silent_is_forgotten(presence, monkeypatch, wait_until, valkey):
    worker = WorkerId.own()
    presence.announce(QUEUE, worker)
    assert presence.is_served(QUEUE)
    monkeypatch.setattr(presence_module, "TTL_SECONDS", 0.1)
    presence.announce(QUEUE, worker)
    wait_until(lambda: not presence.is_served(QUEUE), "the worker is believed no more")
    assert presence.may_be_served_again(QUEUE)
    presence.withdraw(QUEUE, worker)
    assert not presence.may_be_served_again(QUEUE)
    monkeypatch.setattr(presence_module, "SILENCE_SECONDS", 0.1)
    presence.announce(QUEUE, worker)
    wait_until(lambda: not presence.may_be_served_again(QUEUE), "the worker is forgotten")
    with Redis.from_url(valkey.url) as redis:
        wait_until(lambda: not redis.keys(), "no key is left")


def test_a_killed_worker_of_this_host_is_forgotten_at_once(presence, dead_pid):
    presence.announce(QUEUE, WorkerId(socket.gethostname(), dead_pid, "x"))
    assert not presence.is_served(QUEUE)
    assert not presence.may_be_served_again(QUEUE)
    presence.announce(QUEUE, WorkerId("another host", dead_pid, "x"))
    assert presence.is_served(QUEUE)


def test_without_redis_nobody_serves(tmp_path):
    with WorkerPresence(f"unix://{tmp_path}/nowhere.sock") as presence:
        assert not presence.is_served(QUEUE)
        presence.withdraw(QUEUE, WorkerId.own())
        with pytest.raises(RedisError):
            presence.announce(QUEUE, WorkerId.own())
