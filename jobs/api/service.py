"""What the routes do. Synchronous: it waits for the ledger, for Redis and for files, in threads of the server's."""

import logging
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO, Self

from redis.exceptions import RedisError

from ...engine.errors import EngineError
from ...storage.errors import (
    InputError,
    JobEnded,
    LedgerError,
    ManifestDamaged,
    OutputNotEmpty,
    PartDamaged,
    PartMissing,
    SinkError,
    SpoolDamaged,
    StorageError,
    StoreUnavailable,
    UnknownFile,
    UnknownJob,
)
from ...storage.ledger.batch_jobs import JOB_KEY_START
from ...storage.ledger.file_records import FileRecord
from ...storage.ledger.quotas import NO_QUOTA, Quota, QuotaExceeded
from ...storage.ledger.records import DEFAULT_TENANT, JobRecord, JobState
from ...storage.ledger.standing import Standing
from ...storage.output.manifest import OutputMode
from ...storage.readers import InputSource, open_input
from ..batches.files import FileStore
from ..client.client import Client, Job
from ..embedded.valkey import EmbeddedValkeyError
from ..errors import JobError, JobMismatchError, SpecError
from ..planning.producer import Terms, new_job_id
from ..results.json_lines import json_rows
from ..results.row_index import RowIndexes
from ..spec.schemas import JobSpec
from .errors import ApiError, try_later
from .inputs import Inputs
from .job_requests import JobOptions, JobRequest
from .models import ServedModels
from .schemas import JobAnswer, JobList, ResultPage, WebhookList
from .wording import with_fields

logger = logging.getLogger(__name__)

_JOB_ID = re.compile(r"[\w-]{1,64}", re.ASCII)


@dataclass(frozen=True)
class JobService:
    """Jobs on behalf of the HTTP clients of one tenant, to whom those of others do not exist. Thread-safe.

    Every job writes into a folder of its own below the data folder, `outputs/<job id>`.
    """

    client: Client
    models: ServedModels
    tenant: str = DEFAULT_TENANT
    indexes: RowIndexes = field(default_factory=RowIndexes)

    @property
    def inputs(self) -> Inputs:
        return Inputs(self.client.settings)

    def of(self, tenant: str) -> Self:
        return replace(self, tenant=tenant)

    def submit(self, request: JobRequest, idempotency_key: str | None = None, quota: Quota = NO_QUOTA) -> JobAnswer:
        """Queue a job, or find the one that has the key.

        Raises `ApiError` for an unknown model, another job's key or an input that cannot be used, `SpecError`,
        `InvalidRequestError`, `QuotaExceeded`.

        When the ledger or Redis is away: `LedgerUnavailable`, redis' errors; nothing is queued then.
        """
        described = self._described(request, idempotency_key, quota)
        field, input = self._input(request)
        with _of_field(field), _with_room(input) as source:
            return self.job(self._submit(source, *described))

    def submit_file(
        self, options: JobOptions, name: str, file: BinaryIO, idempotency_key: str | None, quota: Quota
    ) -> JobAnswer:
        """As `submit`, over the rows of a file that came with the request under a name."""
        described = self._described(options, idempotency_key, quota)
        input = self.inputs.uploaded(name, file, options.input_format, options.limit)
        with _of_field("file"), _with_room(input) as source:
            return self.job(self._submit(source, *described))

    def job(self, job_id: str) -> JobAnswer:
        """Raises `ApiError` (404)."""
        self.record(job_id)
        [answer] = self._answers([self.client.ledger.overview.standing(job_id)])
        return answer

    def jobs(self, limit: int, after: str | None, state: JobState | None) -> JobList:
        """The newest first; those of the command line are the default tenant's. Raises `ApiError` (400)."""
        page = self.client.ledger.overview.page(self.tenant, limit + 1, self._cursor(after), state)
        found = []
        for job in page[:limit]:
            # One may be deleted meanwhile.
            with suppress(UnknownJob):
                found.append(self.client.ledger.overview.standing(job.id))
        last_id = page[:limit][-1].id if page else None
        return JobList(data=self._answers(found), last_id=last_id, has_more=len(page) > limit)

    def _cursor(self, after: str | None) -> JobRecord | None:
        try:
            return None if after is None else self.record(after)
        except ApiError as error:
            raise ApiError(400, f"after: job {after!r} does not exist", "invalid_cursor", "after") from error

    def _answers(self, found: Sequence[Standing]) -> list[JobAnswer]:
        queues = {each.job.queue for each in found if each.job.finished_at is None}
        workers: Mapping[str, int] = {}
        with suppress(RedisError):
            workers = self.client.num_workers(queues)
        answers = []
        for each in found:
            num_workers = workers.get(each.job.queue) if each.job.finished_at is None else None
            answers.append(JobAnswer.of(each, self.models.name_of(each.job), num_workers))
        return answers

    def cancel(self, job_id: str) -> JobAnswer:
        """A job that has ended stays as it is. Raises `ApiError` (404)."""
        job = Job(self.client, self.record(job_id))
        with suppress(JobEnded):
            job.cancel()
        return self.job(job_id)

    def pause(self, job_id: str) -> JobAnswer:
        """Raises `ApiError` (404), `JobEnded`."""
        self.record(job_id)
        self.client.ledger.pause_job(job_id)
        return self.job(job_id)

    def resume(self, job_id: str) -> JobAnswer:
        """Raises `ApiError` (404), `JobEnded`."""
        Job(self.client, self.record(job_id)).resume()
        return self.job(job_id)

    def retry(self, job_id: str) -> JobAnswer:
        """Raises `ApiError` (404, 507), `JobError` when there is nothing to retry, `PartMissing` and its like."""
        try:
            Job(self.client, self.record(job_id)).retry()
        except (ManifestDamaged, PartMissing, PartDamaged, SpoolDamaged, StoreUnavailable, LedgerError):
            raise
        except StorageError as error:
            # It is noted first that the data set is no longer complete, so that nothing has changed.
            raise _no_room(error) from error
        return self.job(job_id)

    def set_priority(self, job_id: str, priority: int) -> JobAnswer:
        """Raises `ApiError` (404), `JobEnded`."""
        self.record(job_id)
        self.client.ledger.set_priority(job_id, priority)
        return self.job(job_id)

    def delete(self, job_id: str, with_output: bool) -> None:
        """Raises `ApiError` (404, 503), `OutputNotEmpty`, `ManifestDamaged`. What has failed can be asked again."""
        try:
            Job(self.client, self.record(job_id)).delete(with_output)
        except (ManifestDamaged, OutputNotEmpty, StoreUnavailable, LedgerError):
            raise
        except StorageError as error:
            logger.warning("job %s cannot be deleted: %s", job_id, error)
            raise try_later("the job's output cannot be removed, which the server's log explains") from error

    def webhooks(self, job_id: str) -> WebhookList:
        """Raises `ApiError` (404)."""
        return WebhookList.of(self.client.ledger.webhooks.of_job(self.record(job_id).id))

    def results(self, job_id: str, after_row: int | None, limit: int) -> ResultPage:
        """The first `limit` finished rows after the row `after_row`. Raises `ApiError` (404)."""
        # Before its parts: a job that has ended by now has all of them.
        job = self.record(job_id)
        found = self.indexes.of(job_id).first_rows(self.client.ledger, job, limit, after_row)
        rows = list(json_rows(found.table))
        last_row = rows[-1]["row"] if rows else None
        return ResultPage(state=job.state, data=rows, last_row=last_row, has_more=found.has_more)

    def _input(self, request: JobRequest) -> tuple[str, AbstractContextManager[InputSource]]:
        """With the field that names it."""
        given = (request.rows, request.input_file_id, request.input_url)
        if sum(each is not None for each in given) != 1:
            raise SpecError("rows: give either rows, an input_file_id or an input_url", field="rows")
        format, limit = request.input_format, request.limit
        if request.rows is not None:
            return "rows", self._rows(request.rows, limit)
        if request.input_url is not None:
            return "input_url", self.inputs.at(request.input_url, format, limit)
        file = self._file(str(request.input_file_id))
        path = FileStore.of(self.client.settings, self.client.ledger).path(file)
        return "input_file_id", self.inputs.stored(file.filename, path, format, limit)

    @contextmanager
    def _rows(self, rows: Sequence[Mapping[str, Any]], limit: int | None) -> Iterator[InputSource]:
        with self.client.rows_file(rows) as path:
            yield open_input(path, limit, "of rows")

    def _file(self, file_id: str) -> FileRecord:
        try:
            return self.client.ledger.files.get(self.tenant, file_id)
        except UnknownFile as error:
            raise ApiError(404, str(error), "file_not_found", "input_file_id") from error

    def _described(self, options: JobOptions, idempotency_key: str | None, quota: Quota) -> tuple[JobSpec, Terms]:
        """Checked before any input is opened."""
        if idempotency_key is not None and idempotency_key.startswith(JOB_KEY_START):
            raise SpecError(f"Idempotency-Key must not begin with {JOB_KEY_START!r}", field="Idempotency-Key")
        spec = JobSpec.parse(**options.of_spec(self.models.model(options.model)))
        return spec, Terms(
            within_seconds=options.within_seconds,
            idempotency_key=idempotency_key,
            sink=None if options.sink is None else options.sink.spec(self.client.settings.sink_urls),
            webhook=None if options.webhook is None else options.webhook.parsed(),
            priority=options.priority,
            tenant=self.tenant,
            quota=quota,
        )

    def _submit(self, source: InputSource, spec: JobSpec, terms: Terms) -> str:
        """The id of the job that was submitted, now or before with the same key."""
        job_id = new_job_id()
        output = self.client.settings.outputs_folder / job_id
        try:
            return self.client.submit_spec(source, spec, output, OutputMode.NEW, job_id, terms).id
        except JobMismatchError as error:
            raise ApiError(409, with_fields(error), "idempotency_key_reused") from error
        except (EngineError, JobError, InputError, SinkError, QuotaExceeded):
            shutil.rmtree(output, ignore_errors=True)
            raise
        except LedgerError:
            raise
        except (StorageError, OSError) as error:
            if self._is_recorded(job_id):
                # Workers write there by now.
                logger.warning("job %s is queued all the same: %s", job_id, error)
                return job_id
            shutil.rmtree(output, ignore_errors=True)
            if isinstance(error, EmbeddedValkeyError):
                raise
            raise _no_room(error) from error

    def _is_recorded(self, job_id: str) -> bool:
        with suppress(UnknownJob):
            return self.client.ledger.job(job_id).id == job_id
        return False

    def record(self, job_id: str) -> JobRecord:
        """What the ledger says of a job. Raises `ApiError` (404)."""
        if _JOB_ID.fullmatch(job_id):
            with suppress(UnknownJob):
                job = self.client.ledger.job(job_id)
                if job.tenant == self.tenant:
                    return job
        raise ApiError(404, f"job {job_id!r} does not exist", "job_not_found", "job_id")


@contextmanager
def _of_field(field: str) -> Iterator[None]:
    """Raises `ApiError` (422) where the input that a field of the request names cannot be used."""
    try:
        yield
    except InputError as error:
        raise ApiError(422, with_fields(error), "invalid_value", field) from error


@contextmanager
def _with_room(input: AbstractContextManager[InputSource]) -> Iterator[InputSource]:
    """The same. Raises `ApiError` (507) too, where what the client has sent cannot be written down."""
    with ExitStack() as stack:
        try:
            source = stack.enter_context(input)
        except (InputError, LedgerError):
            raise
        except (StorageError, OSError) as error:
            raise _no_room(error) from error
        yield source


def _no_room(error: Exception) -> ApiError:
    logger.warning("a job is refused, it cannot be written down: %s", error)
    return ApiError(507, "the server has no room for the job's rows: try again later", "storage_full")
