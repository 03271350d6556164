"""The application: routes, errors and limits put together."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from importlib.metadata import version

from fastapi import FastAPI
from starlette.datastructures import State

from ..batches.files import FileStore
from ..batches.lines import ENDPOINTS
from ..client.client import Client
from ..live.requests import LiveRequests
from ..results.row_events import WatchedOutputs
from ..settings import Settings
from ..streams.row_watch import RowWatch
from . import docs, health, job_routes, metrics, request_routes, result_routes, row_routes, status
from .admission.admission import Admission
from .admission.authentication import Authentication, KeyRing
from .admission.rate_limits import RateLimits
from .body_limit import FILE_ADVICE, LIVE_ADVICE, MAX_LIVE_BYTES, BodyLimit
from .description import describe
from .errors import answer_errors
from .live_answers import LiveAnswers
from .models import ServedModels
from .openai import batches, chat, completions, files, responses, tokenization
from .openai import models as openai_models
from .openai.route import asking_turns
from .outermost import Application
from .service import JobService

# Whoever watches over the process need not be a user of it, and a page without data is anybody's.
_OPEN_PATHS = frozenset(("/", "/health", "/ready", docs.PATH))
# First what is asked most: routes are tried in their order.
_ROUTERS = (
    chat.router,
    completions.router,
    responses.router,
    health.router,
    metrics.router,
    job_routes.router,
    result_routes.router,
    row_routes.router,
    files.router,
    batches.router,
    tokenization.router,
    openai_models.router,
    request_routes.router,
    status.router,
    docs.router,
)
Beside = Callable[[FastAPI], AbstractAsyncContextManager[object]]


def create_app(
    client: Client, models: ServedModels, beside: Beside = nullcontext, local_names_only: bool = False
) -> FastAPI:
    """The ASGI application over an open client, which has to stay open while it serves.

    `beside`: what is open in the application's event loop for as long as it can answer. `local_names_only`: while no
    key is needed, it answers only who calls it by an IP address or as localhost.
    """
    limits, row_watch = RateLimits(client.redis_url), RowWatch(client.redis_url)
    live = LiveRequests(client.redis_url, client.celery)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        # Closed in this order: what is still called off at the end goes through `live`.
        with live, limits, row_watch:
            answers = LiveAnswers.opened(client, live, app.state.metrics.latencies)
            async with answers as app.state.live, beside(app):
                yield

    app = Application(
        allowed_origins=client.settings.allowed_origins,
        title="Headrace",
        version=version("headrace"),
        description="Batch prompts through your own GPUs.",
        # Their pages load scripts from elsewhere; `docs.router` has one that does not.
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
    )
    _fill_state(app.state, client, models, live)
    app.state.admission = Admission(client.settings, client.ledger, limits, live.num_unanswered)
    app.state.row_watch = row_watch
    _add_middleware(app, client.settings, local_names_only)
    for router in _ROUTERS:
        app.include_router(router)
    answer_errors(app)
    describe(app)
    return app


def _fill_state(state: State, client: Client, models: ServedModels, live: LiveRequests) -> None:
    """What requests are answered with."""
    state.service = JobService(client, models)
    # Set by the server shortly before it ends: answers that are still open are to come to an end.
    state.stopping = asyncio.Event()
    # Set as soon as it was told to: nothing new is to be taken.
    state.leaving = asyncio.Event()
    state.asking_turns = asking_turns()
    state.files = FileStore.of(client.settings, client.ledger)
    state.keys = KeyRing(client.ledger.api_keys)
    state.watched_outputs = WatchedOutputs(client.ledger)
    state.metrics = metrics.Metrics(client, live.num_waiting, {model.live_queue for model in models.all})


def _add_middleware(app: FastAPI, settings: Settings, local_names_only: bool) -> None:
    """Each around those before it."""
    upload_bytes = settings.max_file_bytes + files.MAX_FORM_BYTES
    upload_limit = dict.fromkeys((files.PATH, job_routes.UPLOAD_PATH), (upload_bytes, FILE_ADVICE))
    live_paths, live_bytes = (*ENDPOINTS, *tokenization.PATHS), min(settings.max_body_bytes, MAX_LIVE_BYTES)
    live_limit = dict.fromkeys(live_paths, (live_bytes, LIVE_ADVICE))
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes, other_paths=upload_limit | live_limit)
    # Around the limit: of a request that is nobody's no body is read.
    open_paths = _OPEN_PATHS if settings.metrics_require_key else _OPEN_PATHS | {"/metrics"}
    keys: KeyRing = app.state.keys
    app.add_middleware(
        Authentication,
        keys=keys,
        open_paths=open_paths,
        local_names_only=local_names_only,
        allowed_origins=settings.allowed_origins,
    )
    # Around all: what is refused counts too.
    app.add_middleware(metrics.CountRequests, metrics=app.state.metrics)
