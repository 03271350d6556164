"""`headrace pause`, `resume`, `cancel`, `priority` and `retry`: what can be done with a job that is there."""

from collections.abc import Callable
from typing import Annotated

import typer

from ..client.client import Client, Job
from ..client.display import counted
from .job_names import JobId


def pause(job_id: JobId) -> None:
    """Begin no more rows of a job until it is resumed. What is finished is kept."""
    _do(job_id, Job.pause)


def resume(job_id: JobId) -> None:
    """Let a paused job go on."""
    _do(job_id, Job.resume)


def cancel(job_id: JobId) -> None:
    """Stop a job for good; what is finished is kept."""
    _do(job_id, Job.cancel)


def priority(
    job_id: JobId,
    number: Annotated[int, typer.Argument(metavar="N", min=-1000, max=1000, help="Higher first; 0 at first.")],
) -> None:
    """Have a job's rows begun before those of others. The higher priority goes first."""
    _do(job_id, lambda job: job.set_priority(number))


def retry(job_id: JobId) -> None:
    """Try the failed rows of a completed job again. They stay in the same data set."""
    with Client() as client:
        job = client.job(job_id)
        known = {shard.id for shard in client.ledger.shards(job_id)}
        job.retry()
        asked = sum(shard.num_rows for shard in client.ledger.shards(job_id) if shard.id not in known)
        now = job.progress()
    typer.echo(f"{job_id} is {now.state}: {counted(asked, 'failed row')} of {now.rows_total:,} to be asked again")


def _do(job_id: str, verb: Callable[[Job], None]) -> None:
    with Client() as client:
        job = client.job(job_id)
        verb(job)
        now = job.progress()
    typer.echo(f"{job_id} is {now.state}: {now.rows_done:,} of {now.rows_total:,} rows are committed")
