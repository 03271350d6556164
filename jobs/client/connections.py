"""What a client reaches: the ledger, Redis, and workers by way of their queues."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

from celery import Celery

from ..broker.celery_app import create_app, ring_for_shards
from ..broker.redis_access import redis_server
from ..open_ledger import open_ledger
from ..settings import Settings, SettingsError
from ..workers.local_workers import LocalWorkers, logs_of_workers
from ..workers.presence import WorkerPresence


class Connections:
    """The ledger and Redis, the embedded ones unless configured. A context manager.

    `settings` default to the environment's (`HEADRACE_*`). `places`: what each of the workers that are started where
    there is none has in its environment beside what is there; as many are started. Raises `SettingsError`,
    `EmbeddedValkeyError` or `LedgerError`.
    """

    def __init__(self, settings: Settings | None = None, places: Sequence[Mapping[str, str]] = ({},)) -> None:
        if not isinstance(settings, Settings | None):
            raise SettingsError(f"settings must be a headrace.jobs.settings.Settings, not {settings!r}")
        self.settings = settings or Settings.from_environment()
        self._places = places
        self._stack = ExitStack()
        with ExitStack() as stack:
            self.ledger = stack.enter_context(open_ledger(self.settings))
            self._redis = stack.enter_context(redis_server(self.settings))
            # Others' workers listen to the same queues where several ledgers share a Redis.
            self._presence = stack.enter_context(WorkerPresence(self._redis.url, self.ledger.identity))
            self._app = create_app(self._redis.url)
            stack.callback(self._app.close)
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        self._stack.close()

    @property
    def redis_url(self) -> str:
        return self._redis.url

    @property
    def celery(self) -> Celery:
        """The application that rings for workers."""
        return self._app

    @property
    def jobs_folder(self) -> Path:
        """Where the jobs' spools are."""
        return self.settings.data_dir / "jobs"

    def ring(self, queue: str, shard_ids: Sequence[str]) -> None:
        """Send workers a message for each of these shards of a job, where Redis takes them."""
        self.ensure_redis()
        ring_for_shards(self._app, queue, shard_ids)

    def workers_for(self, queue: str, options: Sequence[str], name: str) -> LocalWorkers:
        """Workers for a queue, to be started if it has none; `options` are those of `headrace worker`."""
        environments = [{**self.settings.environment(), **place} for place in self._places]
        return LocalWorkers(self._presence, queue, options, self.log_of(name), environments)

    def log_of(self, name: str) -> Path:
        """Where the worker that was started for a job, or a request, says what it does; of several the first."""
        return self.settings.data_dir / "logs" / f"worker-{name}.log"

    def remove_logs(self, name: str) -> None:
        """Those of all workers that were started for a job, or a request."""
        for log in logs_of_workers(self.log_of(name)):
            with suppress(OSError):
                log.unlink(missing_ok=True)

    def ensure_redis(self) -> None:
        """Bring the embedded server back should it be gone."""
        self._redis.ensure()

    def expect_room(self) -> None:
        """Raises redis' errors where Redis does not answer or takes nothing in, so that it hears of no worker."""
        self._presence.expect_room()

    def ping_redis(self) -> None:
        """Raises redis' errors, or `EmbeddedValkeyError`, unless Redis answers."""
        self.ensure_redis()
        self._presence.ping()

    def ping_ledger(self) -> None:
        """Raises `LedgerError` unless the database answers."""
        self.ledger.jobs(limit=1)

    def is_served(self, queue: str) -> bool:
        """Whether a worker that has loaded its model listens to a queue."""
        return self._presence.is_served(queue)

    def num_workers(self, queues: Collection[str]) -> dict[str, int]:
        """How many workers listen to each of some queues. Raises redis' errors."""
        return self._presence.num_workers(queues)

    def _num_to_share(self, queue: str) -> int:
        """How many workers share a queue's jobs now, or are to. Raises redis' errors."""
        return max(len(self._places), self.num_workers([queue])[queue])
