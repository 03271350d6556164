"""`headrace jobs`: which there are, by the ledger alone."""

import json
from typing import Annotated

import typer

from ..open_ledger import open_ledger
from ..settings import Settings
from .json_jobs import json_job
from .keys import AsJson
from .tables import print_table, time_text


def jobs(
    limit: Annotated[int, typer.Option(min=1, help="How many, the newest first.")] = 20,
    tenant: Annotated[str | None, typer.Option("--tenant", metavar="NAME", help="Only this tenant's.")] = None,
    as_json: AsJson = False,
) -> None:
    """List jobs, those of all tenants."""
    lines = []
    with open_ledger(Settings.from_environment()) as ledger:
        found = ledger.jobs(limit, tenant)
        if as_json:
            typer.echo(json.dumps([json_job(ledger, job) for job in found]))
            return
        for job in found:
            progress = ledger.progress(job.id)
            rows = f"{progress.rows_done:,}/{progress.rows_total:,}"
            failed = f"{progress.rows_failed:,}"
            lines.append((job.id, str(job.state), rows, failed, time_text(job.created_at), job.output_dir))
    print_table(("JOB", "STATE", "ROWS", "FAILED", "CREATED", "OUTPUT"), lines)
