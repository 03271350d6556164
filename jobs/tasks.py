"""The Celery tasks. Thin: a message rings, the ledger says for which shard."""

from collections.abc import Callable

from celery import Celery

from .celery_app import RUN_SHARD


def register_tasks(app: Celery, run_shard: Callable[[str], None]) -> None:
    """Make the worker's tasks known to `app`. `run_shard` gets the id of the shard that was rung for."""
    app.task(name=RUN_SHARD)(run_shard)
