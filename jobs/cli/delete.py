"""`headrace delete`: forget one job, or all that ended long ago."""

import time
from contextlib import suppress
from datetime import datetime
from typing import Annotated

import typer

from ...storage.errors import LedgerError, StorageError, UnknownJob
from ...storage.ledger.batch_jobs import is_unwritten
from ..client.client import Client, Job
from ..client.display import counted
from ..errors import SpecError
from ..spec.durations import parse_duration
from .tables import time_text
from .wording import with_options


def delete(
    job_id: Annotated[
        str | None, typer.Argument(metavar="JOB", help="A job's id, as `headrace jobs` lists them.")
    ] = None,
    ended_before: Annotated[
        str | None,
        typer.Option(
            "--ended-before",
            metavar="AGE|DATE",
            help="Instead of JOB: all that ended so long ago (30d, 12h) or before a date (2026-11-01). Those "
            "whose batch has not ended, or whose webhook has not been told, stay.",
        ),
    ] = None,
    output_too: Annotated[bool, typer.Option("--output-too", help="Also remove its data set.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be deleted.")] = False,
) -> None:
    """Forget a job, or all that ended before some time; one that has not ended is cancelled. Its data set stays."""
    if (job_id is None) == (ended_before is None):
        raise SpecError("pass a JOB, or --ended-before: one of the two")
    before = None if ended_before is None else _moment(ended_before)
    with Client() as client:
        if before is None:
            assert job_id is not None
            _delete(client, client.job(job_id), output_too, dry_run)
        elif not _delete_all(client, before, output_too, dry_run):
            raise typer.Exit(1)


def _moment(text: str) -> float:
    """Unix seconds of a date or a time, local unless it says otherwise, or so long ago. Raises `SpecError`."""
    with suppress(ValueError, OverflowError, OSError):
        return max(0.0, datetime.fromisoformat(text.strip()).timestamp())
    try:
        return max(0.0, time.time() - parse_duration("--ended-before", text))
    except SpecError:
        known = "an age such as 30d or a date such as 2026-11-01"
        raise SpecError(f"--ended-before must be {known}, not {text!r}") from None


def _delete_all(client: Client, before: float, output_too: bool, dry_run: bool) -> bool:
    """Whether all could be; one that cannot keeps no other."""
    num_deleted = num_kept = 0
    for job_id in client.ledger.tidying.ended_before(before):
        try:
            job = client.job(job_id)
            if (wait := _still_wanted(client, job)) is not None:
                typer.echo(f"{job_id} stays: {wait}")
            elif _delete(client, job, output_too, dry_run, before):
                num_deleted += 1
        except UnknownJob:
            continue
        except LedgerError:
            raise
        except StorageError as error:
            num_kept += 1
            typer.echo(f"headrace: {job_id} is not deleted: {with_options(error)}", err=True)
    done = "would be deleted" if dry_run else "deleted"
    typer.echo(f"{counted(num_deleted, 'job')} that ended before {time_text(before)} {done}")
    return not num_kept


def _still_wanted(client: Client, job: Job) -> str | None:
    """Who has yet to hear of a job that has ended, if somebody has."""
    if is_unwritten(client.ledger, job.record):
        return "its batch has not ended"
    return "its webhook has not been told of its end" if _owes(client, job) else None


def _owes(client: Client, job: Job) -> bool:
    return any(state.is_owed for state, _ in client.ledger.webhooks.of_job(job.id))


def _delete(client: Client, job: Job, output_too: bool, dry_run: bool, before: float | None = None) -> bool:
    """Whether it is, or would be; with `before` not one that has been tried again since then."""
    note = "; its webhook is told nothing more" if before is None and _owes(client, job) else ""
    if not dry_run and not job.delete(output_too, before):
        return False
    kept = "" if output_too else f"; its data set stays in {job.record.output_dir}"
    typer.echo(f"{job.id} {'would be' if dry_run else 'is'} deleted{kept}{note}")
    return True
