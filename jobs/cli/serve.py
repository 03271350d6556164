"""`headrace serve`: the HTTP API, until told to stop."""

import logging
from typing import Annotated

import typer

from ..open_ledger import open_ledger
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
    allow_anonymous: Annotated[
        bool, typer.Option("--allow-anonymous", help="Listen beyond this machine although there is no API key.")
    ] = False,
) -> None:
    """Take jobs over HTTP. Workers do them: run `headrace worker` with the same --model.

    SIGTERM or Ctrl-C ends what is under way and exits. Once `headrace keys create` has made a key, every request
    needs one. Before that everybody who can connect may use it, so it listens on this machine only.
    """
    settings = Settings.from_environment()
    logging.getLogger("headrace").setLevel(settings.log_level)
    # Here, not above: other commands should not wait for the web framework.
    from ..api.models import ServedModels
    from ..api.server import refuse_anonymous
    from ..api.server import serve as serve_api

    if not allow_anonymous:
        with open_ledger(settings) as ledger:
            refuse_anonymous(ledger, host)
    serve_api(settings, ServedModels.of(model), host, port, _say_where)


def _say_where(url: str) -> None:
    typer.echo(f"headrace: listening on {url}")
