"""The application: routes, errors and limits put together."""

from importlib.metadata import version

from fastapi import FastAPI

from ..client import Client
from . import health, routes
from .body_limit import BodyLimit
from .errors import answer_errors
from .models import ServedModels
from .service import JobService

MAX_BODY_BYTES = 64 * 2**20


def create_app(client: Client, models: ServedModels) -> FastAPI:
    """The ASGI application over an open client, which has to stay open while it serves."""
    app = FastAPI(
        title="Headrace",
        version=version("headrace"),
        description="Batch prompts through your own GPUs.",
        # Their pages load scripts from elsewhere. The description itself is at /openapi.json.
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.service = JobService(client, models)
    app.add_middleware(BodyLimit, max_bytes=MAX_BODY_BYTES)
    app.include_router(health.router)
    app.include_router(routes.router)
    answer_errors(app)
    return app
