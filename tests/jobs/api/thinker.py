"""A server and a worker of a model that thinks."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from openai import OpenAI

from headrace.jobs.broker.celery_app import shard_queue
from headrace.jobs.broker.redis_access import redis_server
from headrace.jobs.settings import Settings
from headrace.jobs.spec.precision import Precision
from headrace.jobs.workers.presence import WorkerPresence

from ..api_server import start_api, stop_api
from ..conftest import wait_until
from ..running import environment, started


@dataclass(frozen=True)
class Thinker:
    """`openai`: a client of the server."""

    data_dir: Path
    model: Path
    openai: OpenAI


@contextmanager
def serving(data_dir: Path, model: Path) -> Iterator[Thinker]:
    settings = Settings.from_environment(environment(data_dir))
    command = ["worker", "--model", str(model), "--parent-pid", str(os.getpid())]
    with ExitStack() as stack:
        server = stack.enter_context(redis_server(settings))
        presence = stack.enter_context(WorkerPresence(server.url))
        worker = stack.enter_context(started(command, environment(data_dir), data_dir / "worker"))
        api = start_api(data_dir, data_dir / "api.log", model)
        stack.callback(stop_api, api, data_dir / "api.log")
        queue = shard_queue(str(model), Precision())
        wait_until(lambda: presence.is_served(queue) or worker.poll() is not None, "the worker is ready", 120)
        client = OpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0, timeout=90)
        yield Thinker(data_dir, model, stack.enter_context(client))
