"""`headrace serve`: the HTTP API, until told to stop."""

import logging
from typing import Annotated

import typer

from ..settings import Settings


def serve(
    model: Annotated[
        list[str],
        typer.Option(
            "--model",
            help="Model that requests may name: a folder, by its last part, or a Hugging Face id. May be repeated.",
        ),
    ],
    host: Annotated[str, typer.Option("--host", help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 picks a free one.")] = 8000,
) -> None:
    """Take jobs over HTTP. Workers do them: run `headrace worker` with the same --model.

    SIGTERM or Ctrl-C ends what is under way and exits. There is no access control: listen where only those
    who may use it can connect.
    """
    settings = Settings.from_environment()
    logging.getLogger("headrace").setLevel(settings.log_level)
    # Here, not above: other commands should not wait for the web framework.
    from ..api.models import ServedModels
    from ..api.server import serve as serve_api

    serve_api(settings, ServedModels.of(model), host, port, _say_where)


def _say_where(url: str) -> None:
    typer.echo(f"headrace: listening on {url}")
