"""The Celery tasks. Thin: a message names a shard, the ledger knows the rest."""

from collections.abc import Callable

from celery import Celery

from .celery_app import RUN_SHARD


def register_tasks(app: Celery, run_shard: Callable[[str], None]) -> None:
    """Make the worker's tasks known to `app`. `run_shard` gets a shard's id."""
    app.task(name=RUN_SHARD)(run_shard)
