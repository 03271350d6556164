"""The application: routes, errors and limits put together."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from importlib.metadata import version

from fastapi import FastAPI

from ..batches.files import FileStore
from ..batches.lines import ENDPOINTS
from ..client import Client
from ..live.requests import LiveRequests
from ..streams.row_watch import RowWatch
from . import health, metrics, requests, result_routes, routes, row_routes
from .admission import Admission
from .authentication import Authentication, KeyRing
from .body_limit import MAX_LIVE_BYTES, BodyLimit
from .description import describe
from .errors import answer_errors
from .live import LiveAnswers
from .models import ServedModels
from .openai import batches, chat, completions, files
from .openai import models as openai_models
from .openai.route import asking_turns
from .rate_limits import RateLimits
from .row_events import StoredRows
from .service import JobService

# Whoever watches over the process need not be a user of it.
_OPEN_PATHS = frozenset(("/health", "/ready"))
Beside = Callable[[FastAPI], AbstractAsyncContextManager[object]]


def create_app(client: Client, models: ServedModels, beside: Beside = nullcontext) -> FastAPI:
    """The ASGI application over an open client, which has to stay open while it serves.

    `beside`: what is open in the application's event loop for as long as it can answer.
    """
    limits, row_watch = RateLimits(client.redis_url), RowWatch(client.redis_url)
    live = LiveRequests(client.redis_url, client.celery)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with LiveAnswers.opened(client, live) as app.state.live:
            with live, limits, row_watch:
                async with beside(app):
                    yield

    app = FastAPI(
        title="Headrace",
        version=version("headrace"),
        description="Batch prompts through your own GPUs.",
        # Their pages load scripts from elsewhere. The description itself is at /openapi.json.
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
    )
    settings = client.settings
    app.state.service = JobService(client, models)
    # Set by the server shortly before it ends: answers that are still open are to come to an end.
    app.state.stopping = asyncio.Event()
    # Set as soon as it was told to: nothing new is to be taken.
    app.state.leaving = asyncio.Event()
    app.state.asking_turns = asking_turns()
    app.state.admission = Admission(settings, client.ledger, limits, live.num_unanswered)
    app.state.files = FileStore.of(settings, client.ledger)
    upload_limit = dict.fromkeys((files.PATH, routes.UPLOAD_PATH), settings.max_file_bytes + files.MAX_FORM_BYTES)
    live_limit = dict.fromkeys(ENDPOINTS, min(settings.max_body_bytes, MAX_LIVE_BYTES))
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes, other_paths=upload_limit | live_limit)
    app.state.keys = KeyRing(client.ledger.api_keys)
    # Around the limit: of a request that is nobody's no body is read.
    open_paths = _OPEN_PATHS if settings.metrics_require_key else _OPEN_PATHS | {"/metrics"}
    app.add_middleware(Authentication, keys=app.state.keys, open_paths=open_paths)
    app.state.row_watch = row_watch
    app.state.stored_rows = StoredRows(client.ledger)
    app.state.metrics = metrics.Metrics(client, live.num_waiting, [model.live_queue for model in models.all])
    # Around all: what is refused counts too.
    app.add_middleware(metrics.CountRequests, metrics=app.state.metrics)
    app.include_router(health.router)
    app.include_router(metrics.router)
    app.include_router(routes.router)
    app.include_router(result_routes.router)
    app.include_router(row_routes.router)
    app.include_router(files.router)
    app.include_router(batches.router)
    app.include_router(chat.router)
    app.include_router(completions.router)
    app.include_router(openai_models.router)
    app.include_router(requests.router)
    answer_errors(app)
    describe(app)
    return app
