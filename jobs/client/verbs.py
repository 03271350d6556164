"""What can be done with a job that is there, beside waiting for it."""

import logging
from pathlib import Path

from ...storage.errors import JobEnded, StorageError
from ...storage.ledger.ledger import Ledger
from ...storage.ledger.records import JobRecord, JobState, NewShard, shard_id_of
from ...storage.output.address import open_folder
from ...storage.output.folder import OutputFolder
from ...storage.output.manifest import Manifest, complete_manifest, expect_removable, read_manifest, remove_output_dir
from ...storage.output.parts import parts_of
from ...storage.rows.spool import discard_spool
from ..errors import NotRetriable
from ..shards.finishing import finish_job, publish_committed
from ..shards.retriable import retriable_shards

logger = logging.getLogger(__name__)


def cancel_job(ledger: Ledger, job_id: str) -> None:
    """Stop a job for good; what is committed stays. Raises `UnknownJob`, `JobEnded` when it has completed."""
    if (state := ledger.cancel_job(job_id)) is not JobState.CANCELLED:
        raise JobEnded(f"job {job_id} has ended: it is {state}")
    finish_job(ledger, ledger.job(job_id))


def retry_job(ledger: Ledger, job_id: str) -> list[str]:
    """Let a completed job run again for the rows that failed though they could be asked.

    Returns the ids of the shards to ring for. Raises `UnknownJob`, `NotRetriable`,
    `StorageError` when the rows cannot be read any more.
    """
    job = ledger.job(job_id)
    if job.state is not JobState.COMPLETED:
        raise NotRetriable(f"job {job_id} is {job.state}: only a job that has completed can be retried")
    first = len(ledger.shards(job_id))
    new_shards = [
        NewShard(first + index, shard.num_retriable, str(shard.path), retry_of=shard.number)
        for index, shard in enumerate(retriable_shards(ledger, job))
    ]
    if not new_shards:
        raise NotRetriable(f"job {job_id} has no failed row that could be tried again")
    # Before it runs: as long as the manifest says that it has completed, other ledgers may replace the data set.
    complete_manifest(open_folder(job.output_dir), Manifest(job.id, job.fingerprint), dict)
    if not ledger.retry_job(job_id, new_shards):
        raise NotRetriable(f"job {job_id} is being retried already")
    return [shard_id_of(job_id, shard.number) for shard in new_shards]


def delete_job(
    ledger: Ledger, jobs_folder: Path, job_id: str, with_output: bool, ended_before: float | None = None
) -> bool:
    """Forget a job and remove its spool, and with `with_output` its data set; one that has not ended is stopped.

    With `ended_before`, in Unix seconds, only a job that had ended by then and has not been tried again since; returns
    whether it was. Raises `UnknownJob`, `OutputNotEmpty` when the output folder holds something that is not ours.
    """
    job = ledger.job(job_id)
    output = open_folder(job.output_dir)
    if with_output and _owns(job, output):
        expect_removable(output)
    # First, so that no attempt writes any more.
    if ended_before is None:
        ledger.cancel_job(job_id)
    elif not ledger.tidying.give_up(job_id, ended_before):
        return False
    if not with_output:
        _publish(ledger, job)
    elif _owns(job, output):
        remove_output_dir(output)
    discard_spool(jobs_folder / job_id)
    ledger.delete_job(job_id)
    return True


def _publish(ledger: Ledger, job: JobRecord) -> None:
    """Nobody will know later what was committed."""
    try:
        publish_committed(ledger, job)
    except StorageError as error:
        logger.warning("job %s is deleted, but not all of its rows may be seen: %s", job.id, error)


def _owns(job: JobRecord, output: OutputFolder) -> bool:
    manifest = read_manifest(output)
    if manifest is None:
        # The manifest goes first: a removal that failed has left the rest.
        return bool(parts_of([job.id], (*output.part_names(), *output.maybe_uncommitted())))
    return manifest.job_id == job.id
