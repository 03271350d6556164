"""A job's way to its end: the live display, the summary, and whether it succeeded."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import typer

from ...storage.errors import StorageError
from ...storage.ledger.records import JobState, Progress
from ...storage.output.address import open_folder
from ...storage.output.manifest import owner_of
from ..client.client import Client, Job
from ..client.display import JobDisplay, Pace, counted
from ..results.stored_results import first_error, num_readable
from .summary import summary
from .way_back import way_back


def opening(job: Job, progress: Progress) -> str:
    bad, tokens, shared = job.record.num_planned_errors, job.record.prompt_tokens, job.record.shared_tokens
    return (
        f"{job.id}: {counted(progress.rows_total, 'row')} in {counted(progress.shards_total, 'shard')}"
        + (f", {progress.rows_done:,} done before" if progress.rows_done else "")
        + (f", {shared / tokens:.0%} of {tokens:,} prompt tokens in shared prefixes" if tokens and shared else "")
        + (f", {bad:,} that cannot be asked (see the column 'error')" if bad else "")
    )


def at_first(job: Job) -> Progress:
    """A new job's progress, of which workers that are there may have made some or all by now: that is this run's."""
    sums = ("rows_done", "rows_failed", "rows_from_cache", "rows_truncated", "shards_done")
    tokens = ("prompt_tokens", "cached_tokens", "completion_tokens")
    nothing: dict[str, Any] = dict.fromkeys((*sums, *tokens), 0)
    return replace(job.progress(), state=JobState.RUNNING, **nothing)


def follow(
    client: Client, job: Job, first: Progress, act: Callable[[Progress], None], gpu_hour_price: float | None = None
) -> int:
    """Show each progress until the job has ended, then its summary; `act` is called with those of a running job.

    What was done at `first` is said to be from before. Returns the exit status.
    """
    pace, progress = accompany(client, job, first, act)
    conclude(client, job, pace, progress, job.record.output_dir, gpu_hour_price)
    if (owner := _owner_of_output(job)) not in (None, job.id):
        typer.echo(f"replaced    by {owner}, whose data set the output is now (--overwrite)")
        return 1
    if num_gone := _num_gone(client, job, progress):
        advice = way_back(client.ledger.job(job.id), client.settings)
        told = f"{counted(num_gone, 'row')}: files were removed from the output meanwhile"
        typer.echo(f"gone        {told}" + (f" ({advice})" if advice else ""))
    return 1 if num_gone else exit_status(progress)


def accompany(client: Client, job: Job, first: Progress, act: Callable[[Progress], None]) -> tuple[Pace, Progress]:
    """As `follow`, but for the summary."""
    with JobDisplay(job, first) as display:
        for progress in job.watch():
            display.show(progress)
            if progress.state is JobState.RUNNING:
                act(progress)
    return display.pace, progress


def conclude(
    client: Client, job: Job, pace: Pace, progress: Progress, output: str, gpu_hour_price: float | None
) -> None:
    """The summary of a job that has ended; its answers are in `output`."""
    typer.echo(summary(pace, progress, output, gpu_hour_price))
    if num_others := len(client.ledger.job(job.id).all_weights[1:]):
        typer.echo(f"weights     {num_others + 1} kinds: workers had different files of the model, see the receipts")
    if progress.rows_failed:
        typer.echo(f"first error {first_error(client.ledger, job.record)}")


def _owner_of_output(job: Job) -> str | None:
    """As far as that can be told now."""
    with suppress(StorageError):
        return owner_of(open_folder(job.record.output_dir))
    return None


def _num_gone(client: Client, job: Job, progress: Progress) -> int:
    """Of how many committed rows the parts are not there, as far as that can be told now."""
    with suppress(StorageError):
        return progress.rows_done - num_readable(client.ledger, job.record)
    return 0


def exit_status(progress: Progress) -> int:
    """0 when the job has completed with at least one answer."""
    succeeded = progress.state is JobState.COMPLETED and progress.rows_failed < progress.rows_total
    return 0 if succeeded else 1
