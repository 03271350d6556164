"""`GET /` is a page for people that shows what runs here; `GET /status` is what it reads beside the jobs."""

from typing import Annotated

from fastapi import APIRouter, Depends, Response
from pydantic import BaseModel

from ...storage.ledger.overview import Waiting
from ..client.client import Client
from ..spec.precision import Precision
from ..workers.presence import Worker
from .job_routes import EVERYWHERE
from .live_answers import LiveAnswers
from .models import ServedModels
from .pages import Page
from .state import answers_of, client_of, models_of

router = APIRouter(tags=["health"])
_PAGE = Page("status_page.html")


class QueueStatus(BaseModel):
    """What the running jobs of a queue wait for. `oldest_seconds`: since when the first of them is there.

    `dtype`, `quantization`, `kv_cache_dtype`: the workers' that they want; null where its jobs are none of the newest.
    """

    queue: str
    model: str | None
    dtype: str | None
    quantization: str | None
    kv_cache_dtype: str | None
    running_shards: int
    waiting_shards: int
    waiting_rows: int
    oldest_seconds: float

    @classmethod
    def of(cls, queue: Waiting, models: ServedModels, precision: Precision | None) -> "QueueStatus":
        return cls(
            queue=queue.queue,
            model=None if queue.model is None else models.base_name(queue.model),
            **(dict.fromkeys(Precision._fields) if precision is None else precision._asdict()),
            running_shards=queue.num_running,
            waiting_shards=queue.num_queued,
            waiting_rows=queue.queued_rows,
            oldest_seconds=queue.oldest_seconds,
        )


class WorkerStatus(BaseModel):
    """A worker that is alive. `engine`: what it last told of its engine, by the names of `EngineStats`."""

    name: str
    queue: str
    engine: dict[str, float]

    @classmethod
    def of(cls, worker: Worker) -> "WorkerStatus":
        return cls(name=worker.name, queue=worker.queue, engine=dict(worker.stats))


class ModelStatus(BaseModel):
    """A model that requests may name, and what its workers compute in.

    `waiting_requests`: interactive ones that no worker has.
    """

    name: str
    queue: str
    dtype: str
    quantization: str | None
    kv_cache_dtype: str
    waiting_requests: int


class Status(BaseModel):
    """What runs here, whosever it is."""

    models: list[ModelStatus]
    workers: list[WorkerStatus]
    queues: list[QueueStatus]


@router.get("/", include_in_schema=False)
def page() -> Response:
    """The page holds nothing: it asks for what it shows, with the key that its reader gives it."""
    return _PAGE.response()


@router.get("/status", responses=EVERYWHERE)
def status(
    client: Annotated[Client, Depends(client_of)],
    models: Annotated[ServedModels, Depends(models_of)],
    live: Annotated[LiveAnswers, Depends(answers_of)],
) -> Status:
    """The models, the workers and what their engines do, and what waits in the queues."""
    client.ensure_redis()
    overview = client.ledger.overview
    precisions = {job.queue: Precision.of_spec(job.spec) for job in overview.open_jobs()}
    return Status(
        models=_models(models, live),
        workers=[WorkerStatus.of(worker) for worker in live.workers.all()],
        queues=[QueueStatus.of(queue, models, precisions.get(queue.queue)) for queue in overview.waiting()],
    )


def _models(models: ServedModels, live: LiveAnswers) -> list[ModelStatus]:
    """Adapters wait in their base models' queues."""
    return [
        ModelStatus(
            name=model.name,
            queue=model.shard_queue,
            waiting_requests=live.num_waiting(model),
            **model.precision._asdict(),
        )
        for model in models.all
        if model.lora is None
    ]
