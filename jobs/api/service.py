"""What the routes do. Synchronous: it waits for the ledger, for Redis and for files, in threads of the server's."""

import logging
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kombu.exceptions import OperationalError

from ...engine.errors import EngineError
from ...storage.errors import InputError, UnknownJob
from ...storage.output_dir import OutputMode
from ...storage.readers import open_input
from ...storage.records import JobRecord
from ..client import Client, Job
from ..errors import JobError, JobMismatchError
from ..producer import Terms, new_job_id
from ..schemas import JobSpec
from .errors import ApiError
from .models import ServedModels
from .results import read_page
from .schemas import JobAnswer, JobRequest, ResultPage

logger = logging.getLogger(__name__)

_JOB_ID = re.compile(r"[\w-]{1,64}", re.ASCII)


@dataclass(frozen=True)
class JobService:
    """Jobs on behalf of HTTP clients. Thread-safe.

    Every job writes into a folder of its own below the data folder, `outputs/<job id>`.
    """

    client: Client
    models: ServedModels

    def submit(self, request: JobRequest, idempotency_key: str | None = None) -> JobAnswer:
        """Queue a job, or find the one that has the key.

        Raises `ApiError` for an unknown model or another job's key, `SpecError`, `InputError`, `InvalidRequestError`.

        When the ledger or Redis is away: `LedgerUnavailable`, redis' errors; nothing is queued then.
        """
        spec = JobSpec.parse(
            **request.model_dump(exclude={"rows", "model"}), model=self.models.exact_name(request.model)
        )
        with self.client.rows_file(request.rows) as path:
            return self.job(self._submit(path, spec, new_job_id(), Terms(idempotency_key=idempotency_key)))

    def job(self, job_id: str) -> JobAnswer:
        """Raises `ApiError` (404)."""
        # In this order: a job that has ended by now has the time at which it did.
        self._record(job_id)
        progress = self.client.ledger.progress(job_id)
        return JobAnswer.of(self._record(job_id), progress)

    def jobs(self, limit: int) -> list[JobAnswer]:
        """The newest first, those of the command line included."""
        ledger = self.client.ledger
        return [JobAnswer.of(job, ledger.progress(job.id)) for job in ledger.jobs(limit)]

    def cancel(self, job_id: str) -> JobAnswer:
        """A job that has ended stays as it is. Raises `ApiError` (404)."""
        self._record(job_id)
        self.client.ledger.cancel_job(job_id)
        return self.job(job_id)

    def pause(self, job_id: str) -> JobAnswer:
        """Raises `ApiError` (404), `JobEnded`."""
        self._record(job_id)
        self.client.ledger.pause_job(job_id)
        return self.job(job_id)

    def resume(self, job_id: str) -> JobAnswer:
        """Raises `ApiError` (404), `JobEnded`."""
        return self._rung_for(job_id, Job.resume)

    def retry(self, job_id: str) -> JobAnswer:
        """Raises `ApiError` (404), `JobError` when there is nothing to retry."""
        return self._rung_for(job_id, Job.retry)

    def _rung_for(self, job_id: str, verb: Callable[[Job], None]) -> JobAnswer:
        try:
            verb(Job(self.client, self._record(job_id)))
        except OperationalError as error:
            logger.warning("job %s waits for a sweeper, Redis does not answer: %s", job_id, error)
        return self.job(job_id)

    def results(self, job_id: str, after_row: int | None, limit: int) -> ResultPage:
        """Raises `ApiError` (404)."""
        # Before its parts: a job that has ended by now has all of them.
        job = self._record(job_id)
        page = read_page(self.client.ledger, job, after_row, limit)
        return ResultPage(state=job.state, data=page.rows, last_row=page.last_row, has_more=page.has_more)

    def _submit(self, path: Path, spec: JobSpec, job_id: str, terms: Terms) -> str:
        """The id of the job that was submitted, now or before with the same key."""
        output = self.client.settings.data_dir / "outputs" / job_id
        try:
            return self.client.submit_spec(open_input(path, spec.limit), spec, output, OutputMode.NEW, job_id, terms).id
        except JobMismatchError as error:
            raise ApiError(409, str(error), "idempotency_key_reused") from error
        except (EngineError, JobError, InputError):
            shutil.rmtree(output, ignore_errors=True)
            raise
        except OperationalError as error:
            # The messages are the last of a submission: the job is recorded, and a worker's sweeper finds it.
            logger.warning("job %s waits for a sweeper, Redis does not answer: %s", job_id, error)
            return job_id

    def _record(self, job_id: str) -> JobRecord:
        if _JOB_ID.fullmatch(job_id):
            try:
                return self.client.ledger.job(job_id)
            except UnknownJob:
                pass
        raise ApiError(404, f"job {job_id!r} does not exist", "job_not_found", "job_id")
