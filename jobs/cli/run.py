"""`headrace run` and `submit`: submit rows, start what is missing, show the way, say how it ended."""

import shlex
import sys
from contextlib import suppress
from dataclasses import replace

import typer

from ...engine.config import EngineConfig
from ...storage.errors import ManifestDamaged, UnknownJob
from ...storage.ledger.records import JobState, Progress
from ...storage.output.address import open_folder
from ...storage.output.manifest import OutputMode, read_manifest
from ..client.client import Client, Job
from ..client.display import counted
from ..spec.schemas import JobSpec
from ..workers.placement import place
from .advice import sampling_advice
from .cost import GpuHourPrice
from .follow import at_first, follow, opening
from .interrupts import termination_as_interrupt
from .job_options import JobAsked, asked
from .model_checks import check_model
from .options import data_parallel_size, engine_config, watchdog_seconds, worker_options
from .reading import shown_reading
from .signatures import takes
from .target_options import Target, target


@takes(asked, target, engine_config, watchdog_seconds, data_parallel_size)
def run(
    asked: JobAsked,
    target: Target,
    engine: EngineConfig,
    watchdog: float,
    num_workers: int,
    gpu_hour_price: GpuHourPrice = None,
) -> None:
    """Answer every row of INPUT and write a Parquet data set.

    Ctrl-C stops cleanly; the same command with --resume finishes the rest.
    """
    check_model(asked.spec.model, engine)
    if asked.spec.lora is not None:
        asked.spec.lora.check(engine.max_lora_rank)
    places = place(num_workers, engine.world_size)
    with termination_as_interrupt(), Client(places=places) as client:
        job = None
        try:
            known = _known(client, target)
            job = _submitted(client, asked, target)
            first = _first(known, job)
            typer.echo(opening(job, first), err=True)
            with job.local_workers(worker_options(engine, watchdog)) as workers:
                status = follow(client, job, first, lambda progress: workers.tick(progress.rows_done), gpu_hour_price)
        except KeyboardInterrupt:
            typer.echo(_farewell(job, target.mode), err=True)
            raise
    raise typer.Exit(status)


@takes(asked, target)
def submit(asked: JobAsked, target: Target) -> None:
    """Queue every row of INPUT and return at once. Prints the job's id.

    A worker answers them (headrace worker); `headrace watch` shows how far it is.
    """
    with Client() as client:
        job = _submitted(client, asked, target)
        typer.echo(opening(job, job.progress()), err=True)
        if not job.is_served:
            typer.echo(f"no worker serves it: start one with {job.worker_command}", err=True)
        typer.echo(job.id)


def _known(client: Client, target: Target) -> Progress | None:
    """How far the job is that this run may take up, if there is one."""
    key, tenant = target.terms.idempotency_key, target.terms.tenant
    if key is not None and (job := client.ledger.job_of_key(key, tenant)) is not None:
        return client.ledger.progress(job.id)
    folder = open_folder(target.output)
    # What is wrong with it is said when the job is submitted.
    with suppress(ManifestDamaged, UnknownJob):
        if target.mode is OutputMode.RESUME and (manifest := read_manifest(folder)) is not None:
            return client.ledger.progress(manifest.job_id)
    return None


def _first(known: Progress | None, job: Job) -> Progress:
    """What this run begins with: what was done before, without rows whose files are gone, which are told of."""
    if known is None or known.job_id != job.id:
        return at_first(job)
    # Of a job that had completed, whose rows a worker may have begun with already.
    added = job.client.ledger.shards(job.id)[known.shards_total :] if known.state is JobState.COMPLETED else ()
    if not added:
        return known
    num_gone = sum(shard.num_rows for shard in added)
    typer.echo(f"{counted(num_gone, 'row')} whose files are gone: made again", err=True)
    return replace(job.progress(), state=JobState.RUNNING, rows_done=known.rows_total - num_gone)


def _submitted(client: Client, asked: JobAsked, target: Target) -> Job:
    _hint_at_sampling(asked.spec)
    with asked.open_source(client.settings.inputs_folder) as source, shown_reading(source):
        return client.submit_spec(source, asked.spec, target.output, target.mode, terms=target.terms)


def _hint_at_sampling(spec: JobSpec) -> None:
    # Greedily some models think in circles.
    if spec.sampling.reasoning and (advice := sampling_advice(spec)) is not None:
        typer.echo(f"headrace: the model thinks greedily; its authors advise {advice}", err=True)


def _farewell(job: Job | None, mode: OutputMode) -> str:
    """What an interrupted run has done, and the commands that drop the rest and that go on from there."""
    if job is not None:
        done = job.progress()
        how_far = (
            f"{done.rows_done:,} of {done.rows_total:,} rows are committed (headrace cancel {job.id} drops the rest)"
        )
        option = "--resume"
    else:
        # The folder may already be taken for this job, or still be the one that was to be replaced.
        how_far, option = "no row has run yet", "--overwrite" if mode is OutputMode.OVERWRITE else "--resume"
    words = [word for word in sys.argv[1:] if word not in ("--resume", "--overwrite")]
    return f"\nstopped: {how_far}. To finish the rest:\n  {shlex.join(['headrace', *words, option])}"
