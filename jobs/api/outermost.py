"""What is around all of the application, the answers to faults of ours included, which middleware does not see."""

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from .request_ids import RequestIds


class Application(FastAPI):
    """Names each request, and lets pages of `allowed_origins` read what they are answered ("*": any page)."""

    def __init__(self, *, allowed_origins: Sequence[str] = (), **options: Any) -> None:
        super().__init__(**options)
        self._allowed_origins = allowed_origins

    def build_middleware_stack(self) -> ASGIApp:
        app = super().build_middleware_stack()
        return RequestIds(_for_pages(app, self._allowed_origins) if self._allowed_origins else app)


def _for_pages(app: ASGIApp, allowed_origins: Sequence[str]) -> ASGIApp:
    """Their keys are in headers that they set themselves: cookies and what else browsers add are not asked for.

    So "*" may stand for all headers: clients such as OpenAI's send a dozen of their own.
    """
    return CORSMiddleware(
        app,
        allow_origins=allowed_origins,
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=["*"],
        # Browsers may ask it before a public page reaches a server on this machine.
        allow_private_network=True,
    )
