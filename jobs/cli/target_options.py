"""Where a job writes and on what terms, on the command line: options that `run` and `submit` share."""

import os
from dataclasses import dataclass
from typing import Annotated

import typer

from ...storage.ledger.records import NewWebhook
from ...storage.output.manifest import OutputMode
from ...storage.output.sinks import DEFAULT_TABLE, SinkSpec
from ..errors import SpecError
from ..outside.webhooks import optional_webhook
from ..planning.producer import Terms
from ..spec.durations import parse_duration

_SECRET_VARIABLE = "WEBHOOK_SECRET"
_OUTPUT = typer.Option(
    "--output", metavar="FOLDER|URL", help="Of the Parquet data set; a URL such as s3://bucket/folder."
)
# Of a command that takes `target` and writes nothing.
PossibleOutput = Annotated[str | None, _OUTPUT]


@dataclass(frozen=True)
class Target:
    """Where a job writes, and on what terms."""

    output: str
    mode: OutputMode
    terms: Terms


def target(
    output: Annotated[str, _OUTPUT],
    resume: Annotated[bool, typer.Option("--resume", help="Finish what an interrupted run left open.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the output folder's data set.")] = False,
    within: Annotated[
        str | None,
        typer.Option("--within", metavar="24h", help="Rows without an answer by then expire."),
    ] = None,
    priority: Annotated[
        int,
        typer.Option("--priority", metavar="N", min=-1000, max=1000, help="Begun before jobs with a lower one."),
    ] = 0,
    idempotency_key: Annotated[
        str | None, typer.Option("--idempotency-key", help="The job that was submitted with this key, if there is one.")
    ] = None,
    sink: Annotated[
        str | None,
        typer.Option("--sink", metavar="URL", help="Also write rows to this database: postgresql:// or sqlite:///."),
    ] = None,
    sink_table: Annotated[
        str, typer.Option("--sink-table", metavar="NAME", help="With --sink: the table, made if there is none.")
    ] = DEFAULT_TABLE,
    webhook: Annotated[
        str | None, typer.Option("--webhook", metavar="URL", help="Tell this URL of the job's end with a POST request.")
    ] = None,
    webhook_secret: Annotated[
        str | None,
        typer.Option(
            "--webhook-secret",
            metavar="SECRET",
            envvar=_SECRET_VARIABLE,
            help="With --webhook: what signs it.",
        ),
    ] = None,
) -> Target:
    """Raises `SpecError`, `SinkError`."""
    if sink is None and sink_table != DEFAULT_TABLE:
        raise SpecError("--sink-table is a table of --sink's database: pass both")
    terms = Terms(
        None if within is None else parse_duration("--within", within),
        idempotency_key,
        None if sink is None else SinkSpec.parse(sink, sink_table),
        _webhook(webhook, webhook_secret),
        priority,
    )
    return Target(output, _mode(resume, overwrite), terms)


def _webhook(url: str | None, secret: str | None) -> NewWebhook | None:
    # The environment's is there for all jobs, those without a webhook too.
    is_for_all = url is None and secret == os.environ.get(_SECRET_VARIABLE)
    return optional_webhook(url, None if is_for_all else secret)


def _mode(resume: bool, overwrite: bool) -> OutputMode:
    if resume and overwrite:
        raise SpecError("--resume and --overwrite exclude each other: pass one")
    if resume:
        return OutputMode.RESUME
    return OutputMode.OVERWRITE if overwrite else OutputMode.NEW
