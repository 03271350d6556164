"""`headrace queues`: the backlog as it stands."""

import json
from collections.abc import Callable
from pathlib import Path

from headrace.jobs.broker.celery_app import shard_queue
from headrace.jobs.spec.precision import Precision

from ..running import MODEL, label_arguments


def test_what_waits_is_listed_with_who_serves_it(
    served: Path, headrace, tickets: Path, tmp_path: Path, wait_until: Callable[..., None]
):
    waiting = tmp_path / "data"
    assert headrace(waiting, "queues").out.split("\n")[1:] == [""]
    submitted = headrace(waiting, "submit", *label_arguments(tickets, tmp_path / "out")[1:], "--limit", 80)
    assert submitted.status == 0
    (queue,) = json.loads(headrace(waiting, "queues", "--json").out)
    assert 0 <= queue.pop("oldest_seconds") < 120
    name = shard_queue(str(MODEL), Precision())
    counts = {"num_queued": 3, "num_running": 0, "queued_rows": 80, "num_workers": 0}
    assert queue == {"queue": name, "model": str(MODEL), **counts}
    line = headrace(waiting, "queues").out.splitlines()[1].split()
    assert line[:6] == [name, str(MODEL), "0", "0", "3", "80"]
    # What is paused waits for somebody else.
    headrace(waiting, "pause", submitted.out.strip())
    assert headrace(waiting, "queues").out.splitlines()[1].split()[2:] == ["0", "0", "0", "0", "-"]

    def is_served_by_one() -> bool:
        idle = [line.split() for line in headrace(served, "queues").out.splitlines()]
        return any(line[:3] == [name, str(MODEL), "1"] for line in idle)

    # A worker that stood still for seconds is believed in again when it has said that it is there.
    wait_until(is_served_by_one, "the worker is listed")
