"""`headrace up`: the API and its workers on this machine, in one command."""

import json
import logging
import os
import shlex
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import typer
from redis.exceptions import RedisError

from ...engine.config import EngineConfig
from ..broker.redis_access import redis_server
from ..errors import WorkerFailedError
from ..periodic import Periodic
from ..settings import Settings
from ..spec.lora import worker_options as lora_options
from ..workers.kept_workers import KeptWorkers, names_of_workers
from ..workers.placement import place
from ..workers.presence import RENEW_SECONDS, WorkerId, WorkerPresence
from .interrupts import termination_as_interrupt
from .model_checks import check_model
from .named_lines import print_named
from .options import data_parallel_size, engine_config, watchdog_seconds, worker_options
from .serve import Serving, say_where, serving
from .signatures import takes

if TYPE_CHECKING:
    from ..api.models import ServedModel

_LOOK_SECONDS = 0.2


@takes(serving, engine_config, watchdog_seconds, data_parallel_size)
def up(serving: Serving, engine: EngineConfig, watchdog: float, num_workers: int) -> None:
    """Serve models on this machine: the API and its workers.

    There is a worker for each --model, or as many as --data-parallel-size says, started again should it die. SIGTERM or
    Ctrl-C stops all: the API ends what is under way, the workers hand back what they have not finished. Whatever was
    submitted waits for the next one.
    """
    settings = Settings.from_environment()
    for lora in (model.lora for model in serving.served.all if model.lora is not None):
        lora.check(engine.max_lora_rank)
    for model in serving.served.all:
        check_model(model.exact_name, engine)
    places = place(num_workers, engine.world_size)
    _name_the_lines(settings)
    with (
        termination_as_interrupt(),
        redis_server(settings) as redis,
        WorkerPresence(redis.url) as presence,
    ):
        house = _House(serving, worker_options(engine, watchdog), places, presence)
        with Periodic("readiness", _LOOK_SECONDS, house.look):
            try:
                serving.serve(settings, house.open)
            finally:
                house.close()
    if house.refusal is not None:
        raise WorkerFailedError(f"the worker refused to start: {house.refusal}")


class _House:
    """The workers beside a server."""

    def __init__(
        self,
        serving: Serving,
        worker_options: list[str],
        places: Sequence[Mapping[str, str]],
        presence: WorkerPresence,
    ) -> None:
        self.refusal: str | None = None
        self._presence = presence
        self._id = WorkerId.own()
        self._announce_at = 0.0
        self._url: str | None = None
        self._models = serving.served.all
        self._to_come = list(self._models)
        loras = serving.served.adapters_of
        bases = [model for model in self._models if model.lora is None]
        names = [name for model in bases for name in names_of_workers(model.name, len(places))]
        self._width = max(map(len, names))
        self._workers = [
            self._workers_of(model, [*worker_options, *lora_options(loras(model))], places) for model in bases
        ]

    def open(self, url: str) -> None:
        """Told each URL that the server listens on; the first is that of HTTP."""
        is_first = self._url is None
        if is_first:
            # Before anybody knows whom to ask.
            with suppress(RedisError):
                self._announce_loading()
        say_where(url)
        if is_first:
            self._url = url
            for workers in self._workers:
                workers.start()

    def close(self) -> None:
        KeptWorkers.stop(self._workers)

    def look(self) -> None:
        """Say which models have come to be served. Raises redis' errors."""
        if self._url is None:
            return
        self._announce_loading()
        if not self._to_come:
            return
        for model in [model for model in self._to_come if self._presence.is_served(model.shard_queue)]:
            self._to_come.remove(model)
            typer.echo(f"headrace: {model.name} is ready")
        if not self._to_come:
            typer.echo(f"headrace: try it:\n  {_example(self._url, self._models[0])}")

    def _announce_loading(self) -> None:
        """Of each model without a worker, now and then: its own is started, now or after a pause."""
        if time.monotonic() < self._announce_at:
            return
        for queue in {model.shard_queue for model in self._models}:
            if not self._presence.is_served(queue):
                self._presence.announce_loading(queue, self._id)
        self._announce_at = time.monotonic() + RENEW_SECONDS

    def _workers_of(self, model: "ServedModel", options: list[str], places: Sequence[Mapping[str, str]]) -> KeptWorkers:
        command = ["--model", model.exact_name, *model.worker_options, *options]
        return KeptWorkers(model.name, command, places, partial(print_named, self._width), self._refused)

    def _refused(self, reason: str) -> None:
        """Nothing that this command could do would help: all is stopped."""
        self.refusal = reason
        os.kill(os.getpid(), signal.SIGTERM)


def _name_the_lines(settings: Settings) -> None:
    """This process's log beside those of its workers."""
    logging.getLogger("headrace").setLevel(settings.log_level)
    formatter = logging.Formatter("api | %(asctime)s %(levelname)s %(name)s: %(message)s")
    for handler in logging.getLogger().handlers:
        handler.setFormatter(formatter)


def _example(url: str, model: "ServedModel") -> str:
    body: dict[str, Any] = {"model": model.name, "max_tokens": 50}
    if model.prompts.tokenizer.has_chat_template:
        path, body["messages"] = "chat/completions", [{"role": "user", "content": "Where is my parcel?"}]
    else:
        path, body["prompt"] = "completions", "Once upon a time"
    return shlex.join(["curl", f"{url}/v1/{path}", "-H", "Content-Type: application/json", "-d", json.dumps(body)])
