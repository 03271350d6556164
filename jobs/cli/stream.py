"""`headrace stream`: an answer as it comes."""

import dataclasses
import json
from typing import Annotated

import typer

from ..client.client import Client
from ..streams.events import StreamEvent

StreamId = Annotated[
    str, typer.Argument(metavar="ID", help="A request, req_…; its sample k, req_…/k; or a job's row, JOB/ROW.")
]


def stream(
    stream_id: StreamId,
    after: Annotated[int, typer.Option("--after", min=0, help="Begin after this token, counted from 1.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one event a line as JSON.")] = False,
) -> None:
    """Print an answer's text as it comes. Ends with the answer, with status 1 if it ends in an error."""
    with Client() as client:
        for event in client.stream(stream_id, after):
            typer.echo(_as_json(event) if as_json else event.text, nl=as_json or event.is_final)
    if event.error is not None:
        typer.echo(f"headrace: {event.error.message} ({event.error.code})", err=True)
        raise typer.Exit(1)


def _as_json(event: StreamEvent) -> str:
    """What is there to say; `last` is what to go on `--after`."""
    said = {name: value for name, value in dataclasses.asdict(event).items() if value is not None}
    return json.dumps({**said, "last": event.last}, ensure_ascii=False)
