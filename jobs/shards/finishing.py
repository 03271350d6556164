"""What is left to do when a job has ended: make room, and write down in its folder how it went."""

import logging
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ...storage.errors import LedgerError, PartMissing, StorageError
from ...storage.ledger.batch_jobs import is_unwritten
from ...storage.ledger.ledger import Ledger
from ...storage.ledger.records import JobRecord, JobState, ShardState
from ...storage.output.address import open_folder
from ...storage.output.folder import OutputFolder
from ...storage.output.held_file import is_held
from ...storage.output.manifest import Manifest, belongs_to_another, complete_manifest
from ...storage.output.parts import parts_of
from ...storage.rows.planned_rows import PLANNED_ROWS
from ...storage.rows.spool import discard_spool, lock_of, lost_lock_of
from .retriable import retriable_shards

logger = logging.getLogger(__name__)


def finish_job(ledger: Ledger, job: JobRecord) -> None:
    """Remove what a job that has ended needs no more, and complete its manifest if it has completed.

    What fails of it is logged, and done by whoever comes next. It may be done twice, also at the same time.
    """
    try:
        if job.state is JobState.CANCELLED:
            _finish_cancelled(ledger, job)
            return
        folder = open_folder(job.output_dir)
        remove_strays(ledger, job.id, folder)
        remove_spool(ledger, job)
        # Without a manifest the folder may be on a disk that is gone for now.
        if complete_manifest(folder, Manifest(job.id, job.fingerprint), lambda: _manifest_report(ledger, job.id)):
            ledger.tidying.done(job)
        else:
            ledger.tidying.put_off(job)
    except StorageError as error:
        logger.warning("job %s is %s, but not all is tidy: %s", job.id, job.state, error)
        with suppress(LedgerError):
            ledger.tidying.put_off(job)


def _manifest_report(ledger: Ledger, job_id: str) -> dict[str, Any]:
    """What the manifest says of a job that has completed, by its names there. Raises `LedgerError`."""
    job, progress = ledger.job(job_id), ledger.progress(job_id)
    # A folder's path has no revision, whatever characters it has.
    name, _, revision = (job.model, "", "") if Path(job.model).is_absolute() else job.model.partition("@")
    return {
        "state": str(progress.state),
        "created_at": _utc(job.created_at),
        "started_at": _utc(job.started_at),
        "finished_at": _utc(job.finished_at),
        "rows": {
            "total": progress.rows_total,
            "done": progress.rows_done,
            "failed": progress.rows_failed,
            "truncated": progress.rows_truncated,
            **({"from_cache": progress.rows_from_cache} if job.spec.get("cache") else {}),
        },
        "tokens": {
            "prompt": progress.prompt_tokens,
            "cached": progress.cached_tokens,
            "completion": progress.completion_tokens,
        },
        "model": name,
        "revision": revision or None,
        "weights": job.weights,
        **({"other_weights": job.all_weights[1:]} if job.other_weights else {}),
        "options": job.spec,
        "versions": {package: version(package) for package in ("headrace", "torch")},
    }


def _utc(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def _finish_cancelled(ledger: Ledger, job: JobRecord) -> None:
    # Nothing lets it go on. What a batch's job has not done its keeper is yet to read.
    if is_unwritten(ledger, job):
        ledger.tidying.put_off(job)
    else:
        _remove_folder(job, (Path(shard.spool_path) for shard in ledger.shards(job.id)))
        publish_committed(ledger, job)
        ledger.tidying.done(job)


def publish_committed(ledger: Ledger, job: JobRecord) -> None:
    """Do for a cancelled job what its attempts do as they end, unless they are killed. Raises StorageError."""
    folder = open_folder(job.output_dir)
    hidden = folder.maybe_uncommitted()
    for name in set(hidden).intersection(ledger.part_names(job.id) if hidden else ()):
        with suppress(PartMissing):
            folder.publish(name)


def finish_what_is_left(ledger: Ledger, job: JobRecord) -> None:
    """For who reads a job: do what `finish_job` could not, or was killed before, if nobody is at it."""
    # A ledger that is busy, or that may only be read, keeps nobody from reading.
    with suppress(LedgerError):
        if job.tidy_at is not None and (taken := ledger.tidying.take(job.id)) is not None:
            finish_job(ledger, taken)


def finish_all_left(ledger: Ledger, queue: str) -> None:
    """For a queue's workers: the same for all its jobs. Raises `LedgerError`."""
    for job in ledger.tidying.take_due(queue):
        finish_job(ledger, job)


def remove_strays(ledger: Ledger, job_id: str, folder: OutputFolder) -> None:
    """Remove the parts that attempts at a completed job, and at what was in the folder before, did not commit.

    An attempt that was stopped past its lease may have written after the shard's next attempt had tidied up. Those of
    a retry that has begun meanwhile are left alone, those of jobs that are not of this ledger or have not ended, and
    all where the folder has become another job's. Raises StorageError.
    """
    # In this order: what is committed of these parts, or may yet be, the ledger knows by then.
    names = folder.maybe_uncommitted()
    if not names or belongs_to_another(folder, job_id):
        return
    parts = parts_of([job_id, *ledger.ended_jobs(str(folder))], names)
    shards = ledger.shards(job_id)
    newest = max((shard.attempt_id or 0 for shard in shards), default=0)
    at_work = {shard.attempt_id for shard in shards if shard.state is not ShardState.DONE}
    committed = {part.file_name for part in ledger.parts(job_id)}
    for part in parts:
        if part.file_name not in committed and part.attempt_id <= newest and part.attempt_id not in at_work:
            folder.discard(part.file_name)


def remove_spool(ledger: Ledger, job: JobRecord) -> None:
    """Remove the spooled shards of a completed job, but for those with rows that can be tried again.

    Nothing where it runs again. Raises StorageError, also while rows that got lost are spooled.
    """
    spooled = {Path(shard.spool_path) for shard in ledger.shards(job.id)}
    # In this order: shards that were added since are not among these.
    if any(is_held(lost_lock_of(folder)) for folder in _folders(job, spooled)):
        raise StorageError("rows of it are being spooled")
    if ledger.job(job.id).finished_at != job.finished_at:
        return
    kept = {shard.path for shard in retriable_shards(ledger, job)}
    for path in spooled - kept:
        path.unlink(missing_ok=True)
    if not kept:
        _remove_folder(job, spooled)


def _remove_folder(job: JobRecord, spooled: Iterable[Path]) -> None:
    for folder in _folders(job, spooled):
        _empty(folder)


def _folders(job: JobRecord, spooled: Iterable[Path]) -> set[Path]:
    # Whatever the ledger says, nothing else is removed.
    return {path.parent for path in spooled if path.parent.name == job.id}


def _empty(folder: Path) -> None:
    planned = folder / PLANNED_ROWS
    if not planned.exists():
        discard_spool(folder)
        return
    # Who reads the data set wants it for as long as the job is known.
    with suppress(OSError):
        for path in {lock_of(folder), *folder.iterdir()} - {planned}:
            with suppress(OSError):
                path.unlink(missing_ok=True)
