"""From a new batch to its job: check the lines, submit them. Taken up again by whoever comes, if it was cut short."""

import shutil
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from ...engine.errors import EngineError, ModelError
from ...engine.sampling_params import derived_seed
from ...storage.errors import InputError, UnknownFile
from ...storage.ledger.batch_jobs import batch_job_key
from ...storage.ledger.batch_records import BatchRecord
from ...storage.ledger.quotas import Quota, QuotaExceeded
from ...storage.ledger.records import JobRecord
from ...storage.output.manifest import OutputMode
from ..api.errors import ApiError
from ..api.models import ServedModel, ServedModels
from ..api.wording import with_fields
from ..client.client import Client
from ..errors import JobError, LaterVersion
from ..planning.producer import Terms
from ..spec.sampling import SamplingSpec
from ..spec.schemas import JobSpec
from .files import FileStore
from .lines import CHAT, CHATS, LineError, LineFault, check_lines
from .requests import BatchInput, RequestReader


class InvalidBatch(JobError):
    """A batch can not be run; `errors` say why."""

    def __init__(self, *errors: LineError) -> None:
        super().__init__(errors[0].message)
        self.errors = errors


class ServedElsewhere(Exception):
    """Another server took the batch, for a model that is not served here: that one's to validate, or its successor's.

    Not a `JobError`: nothing is wrong with the batch.
    """

    def __init__(self, model: str) -> None:
        super().__init__(f"no server that has the model {model!r} has taken it up")


@dataclass(frozen=True)
class Validation:
    """Makes jobs of batches."""

    client: Client
    models: ServedModels
    store: FileStore
    # Of batches that wait for their tenant's others: how many tokens they take, as counted when they were tried.
    _needed: dict[str, int] = field(default_factory=dict, init=False)

    def run(self, batch: BatchRecord, on_row: Callable[[], None]) -> JobRecord:
        """The job that was made of the batch, now or by a process that was killed before it could say so.

        `on_row` is called now and then, and may raise. Raises `InvalidBatch`; `ServedElsewhere` and `LaterVersion`
        where it is another server's; and what is worth another try: StorageError, `LedgerError`, redis' and kombu's
        errors.
        """
        if (job := self.client.ledger.job_of_key(batch_job_key(batch.id), batch.tenant)) is None:
            job = self._submit(batch, on_row)
        _remove_leftovers(self.client, batch, job)
        return job

    def _submit(self, batch: BatchRecord, on_row: Callable[[], None]) -> JobRecord:
        try:
            file = self.store.records.get(batch.tenant, batch.input_file_id)
        except UnknownFile as error:
            raise InvalidBatch(LineError("file_not_found", "The input file was deleted or has expired.")) from error
        path = self.store.path(file)
        try:
            # Nobody reads all of it again to find that it has to wait.
            self.client.ledger.check_quota(batch.tenant, self._quota(batch), self._needed.get(batch.id, 0))
            self._needed.pop(batch.id, None)
            expect_served = partial(self._expect_served, batch)
            found = check_lines(path, batch.endpoint, expect_served, self.client.jobs_folder, on_row)
            if found.errors:
                raise InvalidBatch(*found.errors)
            assert found.model is not None
            model = self._model(batch, found.model)
            spec = _spec(batch, model)
            source = BatchInput(path, file.sha256, self._reader(batch, model, spec), on_row)
            return self._queue(batch, spec, source)
        except (InvalidBatch, LaterVersion):
            raise
        except QuotaExceeded as error:
            # Beyond its tenant's quota a batch waits; only one that is too large in itself is refused.
            if error.fits:
                self._needed[batch.id] = error.num_tokens or self._needed.get(batch.id, 0)
                raise
            raise InvalidBatch(LineError("token_limit_exceeded", str(error))) from error
        except (EngineError, InputError, JobError, ApiError) as error:
            raise InvalidBatch(LineError("invalid_request", with_fields(error))) from error

    def _expect_served(self, batch: BatchRecord, model: str) -> None:
        """As the server that took the batch has it, so that all say the same. Raises `LineFault`, `ServedElsewhere`."""
        served = self.models.names if batch.served_models is None else batch.served_models
        if model not in served:
            known = ", ".join(self._told_names(batch))
            raise LineFault("model_not_found", f"The model {model!r} is not served here: use {known}.", "body.model")
        if model not in self.models.names:
            raise ServedElsewhere(model)

    def _told_names(self, batch: BatchRecord) -> list[str]:
        """What the batch's models are called: where folders lie is nothing that clients are told."""
        if isinstance(batch.served_models, dict):
            return list(dict.fromkeys(str(noted["name"]) for noted in batch.served_models.values()))
        return self.models.told_names

    def _model(self, batch: BatchRecord, name: str) -> ServedModel:
        """What the server that took the batch means by the name, where it has said so."""
        noted = batch.served_models
        return ServedModel.read(noted[name]) if isinstance(noted, dict) else self.models.model(name)

    def _reader(self, batch: BatchRecord, model: ServedModel, spec: JobSpec) -> RequestReader:
        try:
            return RequestReader.of(batch.endpoint, spec)
        except ModelError as error:
            if model.exact_name in self.models.names:
                raise
            # Another model of that name.
            raise ServedElsewhere(model.exact_name) from error

    def name_of(self, batch: BatchRecord, job: JobRecord) -> str:
        """What the server that took the batch calls the model that its job was asked of."""
        noted = batch.served_models if isinstance(batch.served_models, dict) else {}
        asked = job.model, job.spec.get("lora")
        names = (str(each["name"]) for each in noted.values() if (each["model"], each["lora"]) == asked)
        return next(names, None) or self.models.name_of(job)

    def _quota(self, batch: BatchRecord) -> Quota:
        tenant = self.client.ledger.tenants.get(batch.tenant)
        most = self.client.settings.max_queued_jobs
        return Quota(tenant.concurrent_jobs, tenant.queued_tokens, most)

    def _queue(self, batch: BatchRecord, spec: JobSpec, source: BatchInput) -> JobRecord:
        # Each try has folders of its own: one that was only stopped may come back and write on. Of all tries the key
        # lets one be recorded.
        job_id = f"{_job_prefix(batch)}{uuid.uuid4().hex[:8]}"
        terms = Terms(
            within_seconds=max(batch.expires_at - time.time(), 0.001),
            idempotency_key=batch_job_key(batch.id),
            tenant=batch.tenant,
            quota=self._quota(batch),
        )
        output = self.client.settings.outputs_folder / job_id
        return self.client.submit_spec(source, spec, output, OutputMode.NEW, job_id, terms).record


def _spec(batch: BatchRecord, model: ServedModel) -> JobSpec:
    # Another batch of the same requests is sampled anew; the same batch, validated again, is not.
    sampling = SamplingSpec(seed=derived_seed(batch.id))
    return JobSpec.parse(
        model=model.exact_name,
        # Workers know conversations and texts.
        endpoint=CHAT if batch.endpoint in CHATS else batch.endpoint,
        sampling=sampling.model_dump(),
        sampling_defaults=dict(model.sampling_defaults),
        lora=model.lora,
        **model.precision._asdict(),
    )


def _job_prefix(batch: BatchRecord) -> str:
    return f"job_{batch.id.removeprefix('batch_')}_"


def _remove_leftovers(client: Client, batch: BatchRecord, job: JobRecord) -> None:
    """What tries before this one have spooled: none of them can be recorded any more."""
    for folder in (client.jobs_folder, client.settings.outputs_folder):
        for path in folder.glob(f"{_job_prefix(batch)}*"):
            if path.is_file():
                path.unlink(missing_ok=True)
            elif path.name != job.id:
                shutil.rmtree(path, ignore_errors=True)
