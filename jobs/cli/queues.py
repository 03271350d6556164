"""`headrace queues`: what waits, for how long, and who works on it."""

import json
from collections import Counter
from dataclasses import asdict
from typing import Any

import typer

from ...storage.overview import Overview, Waiting
from ..client import Client
from ..presence import WorkerPresence
from .display import duration
from .keys import AsJson
from .tables import print_table

_HEADING = ("QUEUE", "MODEL", "WORKERS", "RUNNING SHARDS", "WAITING SHARDS", "WAITING ROWS", "OLDEST")


def queues(as_json: AsJson = False) -> None:
    """List what waits for workers, and for how long.

    Queues that jobs wait on or workers serve: how much waits, and how long the oldest job has.
    """
    with Client() as client, WorkerPresence(client.redis_url) as presence:
        waiting = Overview(client.ledger.database).waiting()
        workers = Counter(worker.queue for worker in presence.workers())
    idle = [Waiting(queue, None, 0, 0, 0, 0.0) for queue in sorted(workers.keys() - {each.queue for each in waiting})]
    found = [asdict(each) | {"num_workers": workers[each.queue]} for each in (*waiting, *idle)]
    if as_json:
        typer.echo(json.dumps(found))
    else:
        print_table(_HEADING, map(_line, found))


def _line(queue: dict[str, Any]) -> tuple[str, ...]:
    counts = (queue["num_workers"], queue["num_running"], queue["num_queued"], queue["queued_rows"])
    oldest = duration(queue["oldest_seconds"]) if queue["num_queued"] else "-"
    return (queue["queue"], queue["model"] or "-", *(f"{count:,}" for count in counts), oldest)
