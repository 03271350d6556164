"""Shards keep moving when a worker dies, a message is lost or the ledger was away."""

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from celery import Celery
from redis import Redis

from headrace.jobs.broker.celery_app import create_app, send_shards
from headrace.jobs.embedded.valkey import EmbeddedValkey
from headrace.jobs.shards import sweeper as sweeper_module
from headrace.jobs.shards.sweeper import Sweeper
from headrace.storage.ledger import leases
from headrace.storage.ledger.ledger import Ledger
from headrace.storage.ledger.records import NewJob, NewShard, ShardState

from ...storage.ledger.claiming import take_shard
from ..answers import WAIT_SECONDS

QUEUE = "headrace.bulk.0123456789ab"
OVER = -1.0
IDS = [f"job/{number:05d}" for number in range(3)]


@dataclass
class Place:
    """A ledger with a job of three shards, and a Redis that has heard of none of them."""

    ledger: Ledger
    app: Celery
    redis: Redis

    def messages(self) -> int:
        return sum(self.redis.llen(key) for key in self.redis.keys(f"{QUEUE}*"))

    def sweep(self) -> None:
        Sweeper(self.ledger, self.app, QUEUE).sweep()


@pytest.fixture
def place(tmp_path, monkeypatch) -> Iterator[Place]:
    monkeypatch.setattr(sweeper_module, "_LOST_MESSAGE_SECONDS", 600.0)
    ledger = Ledger(f"sqlite:///{tmp_path / 'ledger.db'}")
    ledger.migrate()
    shards = [NewShard(number, 2, "/spool") for number in range(3)]
    with EmbeddedValkey(tmp_path) as valkey, Redis.from_url(valkey.url) as redis:
        ledger.create_job(NewJob("job", QUEUE, "m", "/out", "f", 6), shards)
        yield Place(ledger, create_app(valkey.url), redis)
    ledger.close()


def test_a_message_that_is_merely_late_is_left_alone(place):
    place.sweep()
    assert place.messages() == 0


def test_lost_messages_are_sent_again(place, monkeypatch):
    monkeypatch.setattr(sweeper_module, "_LOST_MESSAGE_SECONDS", 0.0)
    place.sweep()
    assert place.messages() == 3


def test_while_messages_wait_none_is_lost(place, monkeypatch):
    monkeypatch.setattr(sweeper_module, "_LOST_MESSAGE_SECONDS", 0.0)
    send_shards(place.app, QUEUE, IDS[:1])
    place.sweep()
    assert place.messages() == 1


def test_a_shard_handed_back_is_offered_at_once(place):
    claim = take_shard(place.ledger, IDS[1], "worker", 60)
    assert claim is not None
    place.ledger.leases.release(claim)
    place.sweep()
    assert place.messages() == 1


def test_what_a_dead_worker_held_is_put_back_ahead_of_what_waits(place):
    send_shards(place.app, QUEUE, IDS[1:])
    assert take_shard(place.ledger, IDS[0], "dead worker", OVER) is not None
    place.sweep()
    assert place.ledger.shards("job")[0].state is ShardState.QUEUED
    assert IDS[0].encode() in place.redis.lindex(QUEUE, 0)
    assert place.messages() == 3
    place.sweep()
    assert place.messages() == 3


def test_a_lease_that_holds_is_respected(place):
    assert take_shard(place.ledger, IDS[0], "worker", 60) is not None
    place.sweep()
    assert place.ledger.shards("job")[0].state is ShardState.RUNNING


def test_a_paused_job_is_not_rung_for_until_it_goes_on(place, monkeypatch):
    """Not for what a dead worker held, what is to be tried again or what was never rung for; then for all of it."""
    monkeypatch.setattr(sweeper_module, "_LOST_MESSAGE_SECONDS", 0.0)
    monkeypatch.setattr(leases, "_FIRST_PAUSE_SECONDS", 0.0)
    assert take_shard(place.ledger, IDS[0], "dead worker", OVER) is not None
    failing = take_shard(place.ledger, IDS[1], "worker", 60)
    assert failing is not None
    place.ledger.leases.release(failing, "the disk is full")
    place.ledger.pause_job("job")
    place.sweep()
    assert place.messages() == 0
    rung_for = place.ledger.resume_job("job")
    assert rung_for == IDS[1:]
    # Redis was away, so that its bells are lost: what is put back goes first, what was merely rung for has to wait.
    place.sweep()
    assert place.messages() == 2
    place.redis.flushdb()
    place.sweep()
    assert place.messages() == 3
    assert [shard.state for shard in place.ledger.shards("job")] == [ShardState.QUEUED] * 3


def test_after_an_outage_of_the_ledger_its_workers_get_the_time_to_renew(place, tmp_path, start, monkeypatch):
    """While it could not be written to, every lease ran out: that makes nobody dead."""
    lease, now = 60.0, 0.0
    monkeypatch.setattr(sweeper_module, "time", SimpleNamespace(monotonic=lambda: now))
    sweeper = Sweeper(place.ledger, place.app, QUEUE, lease)
    alive = take_shard(place.ledger, IDS[0], "alive", OVER)
    assert take_shard(place.ledger, IDS[1], "dead", OVER) is not None
    asks, due_retries = threading.Event(), place.ledger.messages.due_retries

    def asked(queue: str) -> list[str]:
        asks.set()
        return due_retries(queue)

    monkeypatch.setattr(place.ledger.messages, "due_retries", asked)
    with closing(sqlite3.connect(tmp_path / "ledger.db", isolation_level=None)) as locking:
        locking.execute("BEGIN IMMEDIATE")
        swept = start(sweeper.sweep)
        # The sweeper waits for the lock meanwhile, from when it has asked for it. Time flies.
        assert asks.wait(WAIT_SECONDS)
        now += lease
        assert not swept.done()
        locking.execute("ROLLBACK")
        swept.result(WAIT_SECONDS)
    assert [shard.state for shard in place.ledger.shards("job")[:2]] == [ShardState.RUNNING] * 2
    assert place.ledger.leases.renew("alive", [alive.attempt_id], lease) == {alive.attempt_id}
    now += lease
    sweeper.sweep()
    assert [shard.state for shard in place.ledger.shards("job")[:2]] == [ShardState.RUNNING, ShardState.QUEUED]
