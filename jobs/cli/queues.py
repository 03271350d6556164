"""`headrace queues`: what waits, for how long, and who works on it."""

import json
from collections import Counter
from dataclasses import asdict
from typing import Any

import typer

from ...storage.ledger.overview import Waiting
from ..client.client import Client
from ..client.display import duration
from ..workers.presence import WorkerPresence
from .keys import AsJson
from .tables import print_table

_HEADING = ("QUEUE", "MODEL", "WORKERS", "RUNNING SHARDS", "WAITING SHARDS", "WAITING ROWS", "OLDEST")


def queues(as_json: AsJson = False) -> None:
    """List what waits for workers, and for how long.

    Queues that jobs wait on or workers serve: how much waits, and how long the oldest job has.
    """
    with Client() as client, WorkerPresence(client.redis_url) as presence:
        waiting = client.ledger.overview.waiting()
        workers = presence.workers()
    models = {worker.queue: worker.model for worker in workers}
    counts = Counter(worker.queue for worker in workers)
    idle = sorted(counts.keys() - {each.queue for each in waiting})
    lines = (*waiting, *(Waiting(queue, models[queue], 0, 0, 0, 0.0) for queue in idle))
    found = [asdict(each) | {"num_workers": counts[each.queue]} for each in lines]
    if as_json:
        typer.echo(json.dumps(found))
    else:
        print_table(_HEADING, map(_line, found))


def _line(queue: dict[str, Any]) -> tuple[str, ...]:
    counts = (queue["num_workers"], queue["num_running"], queue["num_queued"], queue["queued_rows"])
    oldest = duration(queue["oldest_seconds"]) if queue["num_queued"] else "-"
    return (queue["queue"], queue["model"] or "-", *(f"{count:,}" for count in counts), oldest)
