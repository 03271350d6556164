"""Interactive requests are heard while bulk shards hold every thread, and take none of theirs."""

import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from redis import Redis

from headrace.jobs.broker.celery_app import (
    create_app,
    live_queue,
    queue_is_empty,
    ring_for_requests,
    send_shards,
    shard_queue,
)
from headrace.jobs.spec.precision import Precision

SCRIPT = Path(__file__).parents[1] / "shard_worker.py"
BULK, LIVE = shard_queue("m", Precision()), live_queue("m", Precision())


def test_the_two_queues_of_a_model_have_one_key():
    assert LIVE.removeprefix("headrace.live.") == BULK.removeprefix("headrace.bulk.")
    assert live_queue("m", Precision("auto", "int8")) != LIVE


@pytest.fixture
def events(tmp_path) -> Path:
    file = tmp_path / "events"
    file.touch()
    return file


def test_bulk_in_every_thread_delays_no_bell(valkey, tmp_path, events, wait_until):
    app = create_app(valkey.url)
    shards = [f"job/{number}" for number in range(5)]
    send_shards(app, BULK, shards)
    data_dir = Path(valkey.url.removeprefix("unix://")).parents[1]
    command = [sys.executable, SCRIPT, data_dir, BULK, "2", events, tmp_path / "go", LIVE]

    def lines(kind: str) -> list[str]:
        return [line.removeprefix(f"{kind} ") for line in events.read_text().splitlines() if line.startswith(kind)]

    with (
        subprocess.Popen(command, stderr=subprocess.DEVNULL) as worker,
        Redis.from_url(valkey.url) as redis,
        ExitStack() as stack,
    ):
        # When anything fails here; it does no harm to one that has ended.
        stack.callback(worker.kill)
        wait_until(lambda: len(lines("start")) == 2, "both threads are taken")
        # A bell for sixteen, and one for the others.
        ring_for_requests(app, LIVE, [f"req_{number}" for number in range(20)])
        wait_until(lambda: len(lines("bell")) == 20, "every bell is heard")
        assert lines("bell") == [f"req_{number}" for number in range(20)]
        # One by one and not in a batch: while it waits for one message it is there for the next.
        ring_for_requests(app, LIVE, ["req_last"])
        wait_until(lambda: lines("bell")[-1] == "req_last", "another one is heard")
        # Which thread says so first is theirs.
        assert (sorted(lines("start")), lines("end")) == (shards[:2], [])
        assert sum(redis.llen(key) for key in redis.keys(f"{BULK}*")) == 3
        assert queue_is_empty(app, LIVE)
        (tmp_path / "go").touch()
        wait_until(lambda: len(lines("end")) == 5, "all shards have run")
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(60) == 0
    app.close()
