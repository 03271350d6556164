"""Whether a worker serves a model now, and what a client is told where none does."""

import asyncio
import logging
import shlex
import time

from anyio.to_thread import run_sync

from ..client.client import Client
from ..workers.presence import RENEW_SECONDS, Worker, WorkerPresence
from .errors import RETRY_SOON, ApiError
from .models import ServedModel

logger = logging.getLogger(__name__)

# How long a request waits for a worker that has gone silent, and how often it looks.
RETURN_SECONDS = 10.0
_LOOK_SECONDS = 0.25


class NoWorker(ApiError):
    """No worker serves the model now (503). `may_return`: one that did is silent, and not known to be gone.

    `is_loading`: one is about to.
    """

    def __init__(self, model: ServedModel, may_return: bool, is_loading: bool = False) -> None:
        self.model = model
        self.may_return = may_return
        if is_loading:
            message = f"the model {model.name!r} is being loaded: try again in some seconds"
        else:
            message = f"no worker serves the model {model.name!r} now: start one with `{_command(model)}`"
        super().__init__(503, message, "model_loading" if is_loading else "no_worker", "model")
        self.headers = RETRY_SOON


def _command(model: ServedModel) -> str:
    # Where folders lie on this machine is nothing that clients are told.
    shown = f"<the folder {model.name}>" if model.exact_name.startswith("/") else model.name
    return " ".join(["headrace worker --model", shown, *model.worker_options])


class WorkerWatch:
    """Plain methods block and are thread-safe; the asynchronous one is for one event loop."""

    def __init__(self, client: Client, presence: WorkerPresence) -> None:
        self._client = client
        self._presence = presence
        self._served_until: dict[str, float] = {}
        # Queues of which the log says that they have no worker.
        self._unserved: set[str] = set()
        # By queue, for workers that have gone silent.
        self._looks: dict[str, asyncio.Task[bool]] = {}

    def expect(self, model: ServedModel) -> None:
        """Raises `NoWorker`, or redis' errors when Redis does not answer or is full.

        A worker found is believed for a second.
        """
        queue, now = model.shard_queue, time.monotonic()
        if self._served_until.get(queue, 0.0) > now:
            return
        self._client.ensure_redis()
        if not self._presence.is_served(queue):
            self._presence.expect_room()
            is_loading = self._presence.is_loading(queue)
            if queue not in self._unserved and not is_loading:
                self._unserved.add(queue)
                command = shlex.join(["headrace", "worker", "--model", model.exact_name, *model.worker_options])
                logger.warning("no worker: start one with %s", command)
            raise NoWorker(model, self._presence.may_be_served_again(queue), is_loading)
        self._unserved.discard(queue)
        self._served_until[queue] = now + RENEW_SECONDS

    async def wait_for(self, model: ServedModel) -> None:
        """Until a worker serves the model, for some seconds at most: one that is starved comes back by then.

        However many wait, Redis is asked once for all.
        """
        deadline = time.monotonic() + RETURN_SECONDS
        while time.monotonic() < deadline and not await asyncio.shield(self._next_look(model.shard_queue)):
            pass

    def _next_look(self, queue: str) -> "asyncio.Task[bool]":
        if (look := self._looks.get(queue)) is None:
            look = self._looks[queue] = asyncio.ensure_future(self._look(queue))
            look.add_done_callback(lambda _: self._looks.pop(queue))
        return look

    async def _look(self, queue: str) -> bool:
        """Whether a worker is there in a moment."""
        await asyncio.sleep(_LOOK_SECONDS)
        return await run_sync(self._presence.is_served, queue)

    def all(self) -> list[Worker]:
        """Those that are alive, of whatever model. Raises redis' errors."""
        return self._presence.workers()
