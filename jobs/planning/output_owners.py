"""Whose an output folder is: the job that writes there, which goes on, or which gives way to a new one."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from celery import Celery

from ...storage.errors import Argument, JobEnded, LedgerError, ManifestDamaged, OutputNotEmpty, StorageError, UnknownJob
from ...storage.ledger.ledger import Ledger
from ...storage.ledger.records import JobRecord, JobState
from ...storage.output.address import is_same_folder, open_folder
from ...storage.output.folder import OutputFolder
from ...storage.output.held_file import abandoned_lock, held_lock
from ...storage.output.manifest import Manifest, OutputMode, read_report
from ...storage.rows.spool import discard_spool, lock_of
from ..broker.celery_app import ring_for_shards
from ..errors import JobMismatchError
from ..shards.finishing import remove_strays
from ..spec.schemas import JobSpec
from ..spec.stored import read_stored

_OVERWRITE, _CACHE = OutputMode.OVERWRITE.argument, Argument("cache")
_LIMIT = "another limit"


@dataclass(frozen=True)
class OutputOwners:
    """`jobs_folder` holds the spools, and the locks of jobs that are being submitted."""

    ledger: Ledger
    app: Celery
    jobs_folder: Path

    @contextmanager
    def submitting(self, job_id: str, output: OutputFolder) -> Iterator[None]:
        """Until the context ends nobody else submits this job. Raises `JobMismatchError` where another does so."""
        with ExitStack() as stack:
            try:
                stack.enter_context(held_lock(lock_of(self.jobs_folder / job_id), self.ledger.identity))
            except StorageError as error:
                raise JobMismatchError(
                    f"job {job_id} of output folder {output} is being submitted by another process: wait until it "
                    "has been, then run the same command again"
                ) from error
            yield

    def discard_abandoned(self) -> None:
        """Remove what submitters that were killed have spooled for jobs of this ledger and not recorded."""
        for lock in self.jobs_folder.glob(lock_of(Path("*")).name):
            # Somebody holds it, it has gone, or what it is about cannot be known now.
            with suppress(OSError, LedgerError), abandoned_lock(lock) as ledger:
                if ledger == self.ledger.identity and not self._is_known(lock.stem):
                    discard_spool(lock.with_suffix(""))

    def _is_known(self, job_id: str) -> bool:
        try:
            return self.ledger.job(job_id).id == job_id
        except UnknownJob:
            return False

    def cancel_owner(self, output: OutputFolder) -> str | None:
        """Keep the workers of the job that is about to be replaced from writing on, and say which that is.

        Raises `OutputNotEmpty` where only another ledger could do so, `JobMismatchError` while it is being submitted.
        """
        # Nobody works on what cannot be read.
        with suppress(ManifestDamaged):
            if (report := read_report(output)) is None:
                return None
            job_id: str = report["job_id"]
            if self._is_anothers(report.get("ledger")) and "state" not in report:
                raise OutputNotEmpty(
                    f"output folder {output} belongs to job {job_id} of another ledger, whose workers may still write "
                    f"there: delete it with that ledger (headrace delete {job_id} --output-too), remove the folder if "
                    "that ledger is gone, or choose another"
                )
            with self.submitting(job_id, output):
                self._cancel(job_id)
            return job_id
        return None

    def cancel_homeless(self, output: OutputFolder) -> None:
        """End the jobs whose folder was removed by hand: a worker would put their rows beside those of the new job."""
        for job_id in self.ledger.open_jobs(str(output)):
            self._cancel(job_id)

    def resumed(self, manifest: Manifest, fingerprint: str, spec: JobSpec, output: OutputFolder) -> JobRecord | None:
        """The job of an output folder, rung for again; None when it was killed before it was recorded."""
        if self._is_anothers(manifest.ledger):
            raise JobMismatchError(
                f"output folder {output} belongs to job {manifest.job_id} of another ledger: set HEADRACE_DATA_DIR or "
                "HEADRACE_DATABASE_URL as it was then, or choose another folder"
            )
        try:
            job = self.ledger.job(manifest.job_id)
        except UnknownJob as error:
            if output.part_names() or output.maybe_uncommitted():
                if manifest.ledger == self.ledger.identity:
                    problem = f"job {manifest.job_id} of output folder {output} was deleted: pass "
                    raise JobMismatchError(problem, _OVERWRITE) from error
                raise JobMismatchError(
                    f"output folder {output} was written with another ledger: set HEADRACE_DATA_DIR or "
                    "HEADRACE_DATABASE_URL as it was then, or pass ",
                    _OVERWRITE,
                ) from error
            job = None
        if manifest.fingerprint != fingerprint:
            other = difference(job, spec)
            # A pilot, as it were.
            hint = ("; with ", _CACHE, " a job takes the answers of earlier ones that had it too") * (other == _LIMIT)
            raise JobMismatchError(
                f"output folder {output} belongs to a job with {other}: "
                "resume with the same input and options, or pass ",
                _OVERWRITE,
                *hint,
            )
        if job is not None:
            if not is_same_folder(job.output_dir, str(output)):
                raise JobMismatchError(
                    f"output folder {output} was moved or copied from {job.output_dir}, where job {job.id} writes: "
                    "move it back, resume it there, or pass ",
                    _OVERWRITE,
                )
            self._ring_again(job)
        return job

    def _ring_again(self, job: JobRecord) -> None:
        """Raises `JobMismatchError` when resuming would not complete the data set."""
        if job.state is JobState.CANCELLED:
            raise JobMismatchError(f"job {job.id} of output folder {job.output_dir} was cancelled: pass ", _OVERWRITE)
        if job.state.has_ended:
            # Who completed it may have been killed before all was tidy.
            remove_strays(self.ledger, job.id, open_folder(job.output_dir))
            return
        # It may end at this moment.
        with suppress(JobEnded):
            ring_for_shards(self.app, job.queue, self.ledger.resume_job(job.id))

    def _cancel(self, job_id: str) -> None:
        # Completed with another ledger, or killed before it was recorded.
        with suppress(UnknownJob):
            self.ledger.cancel_job(job_id)
        discard_spool(self.jobs_folder / job_id)

    def _is_anothers(self, ledger: str | None) -> bool:
        """Whether a manifest was written with another ledger, as far as it says so."""
        return ledger not in (None, self.ledger.identity)


def difference(job: JobRecord | None, spec: JobSpec) -> str:
    """Which options differ, in the user's words."""
    if job is None:
        return "another input or other options"
    before, asked = _options(read_stored(JobSpec, job.spec)), _options(spec)
    names = [name for name, value in asked.items() if before[name] != value]
    if names:
        return f"another {', '.join(names)}"
    return "another input" if spec.image is None else "another input, or image files that changed or were missing"


def _options(spec: JobSpec) -> dict[str, Any]:
    options = spec.model_dump(mode="json", exclude={"schema_version", "told_time", "sampling"})
    return {**options, **spec.sampling.model_dump(mode="json")}
