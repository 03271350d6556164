"""Submitting: plan the input, spool its shards, record the job, ring for a worker. Idempotent by the output folder."""

import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

from celery import Celery

from ...engine.errors import shown
from ...storage.errors import Argument, InputError, LedgerError, SinkError
from ...storage.ledger.ledger import Ledger
from ...storage.ledger.quotas import NO_QUOTA, Quota, QuotaExceeded
from ...storage.ledger.records import DEFAULT_TENANT, JobRecord, JobState, NewJob, NewWebhook, shard_id_of
from ...storage.output.address import has_file, open_folder
from ...storage.output.folder import OutputFolder
from ...storage.output.held_file import held_lock
from ...storage.output.manifest import (
    Manifest,
    OutputMode,
    complete_manifest,
    expect_owner,
    expect_removable,
    owner_of,
    prepare_output_dir,
    remove_output_dir,
    write_manifest,
)
from ...storage.output.sinks import SinkSpec, SqlSink, check_reachable
from ...storage.readers import InputSource, is_unicode
from ...storage.rows.planned_rows import plan_anew
from ...storage.rows.spool import carried_fields, lost_lock_of
from ..broker.celery_app import ring_for_shards, shard_queue
from ..errors import JobMismatchError, SpecError
from ..shards.part_schema import part_schema
from ..spec.row_images import images_fingerprint
from ..spec.schemas import JobSpec
from ..spec.stored import read_stored
from .lost_rows import LostRows
from .output_owners import OutputOwners, difference
from .planner import Plan, Planner, make_planner
from .rendering import PromptRenderer


@dataclass(frozen=True)
class Terms:
    """What a job is held to beside its answers.

    `within_seconds` after it is recorded, rows without an answer expire. Of two jobs of a tenant with one
    `idempotency_key` the second is the first, whatever its output, deadline and priority. Its rows also go to the
    `sink`; its end is told to the `webhook`. Jobs with a higher `priority` come first. It is not taken beyond the
    `quota`.
    """

    within_seconds: float | None = None
    idempotency_key: str | None = None
    sink: SinkSpec | None = None
    webhook: NewWebhook | None = None
    priority: int = 0
    tenant: str = DEFAULT_TENANT
    quota: Quota = NO_QUOTA

    def __post_init__(self) -> None:
        """Raises `SpecError`."""
        if not isinstance(self.idempotency_key, str | None):
            raise SpecError(Argument("idempotency_key"), f" must be a text, not {shown(self.idempotency_key)}")
        if self.idempotency_key is not None and not is_unicode(self.idempotency_key):
            raise SpecError(Argument("idempotency_key"), " is not valid UTF-8")
        if self.idempotency_key == "":
            raise SpecError(Argument("idempotency_key"), " is empty: leave it out, or name the job by it")


NO_TERMS = Terms()


@dataclass(frozen=True)
class _Taken:
    """What is written for a job before it is recorded. `had_folder`: the user had made it, so it stays."""

    job_id: str
    output: OutputFolder
    spool: Path
    had_folder: bool

    def give_back(self) -> None:
        """The job is not to be. Raises StorageError."""
        shutil.rmtree(self.spool, ignore_errors=True)
        remove_output_dir(self.output, keep_folder=self.had_folder)


@dataclass(frozen=True)
class Producer:
    """Puts jobs on the queue. `jobs_folder` holds the spools; `shard_rows`: as a `Planner`'s.

    `num_to_share`: how many workers share a queue's jobs, or are about to.
    """

    ledger: Ledger
    app: Celery
    jobs_folder: Path
    shard_rows: int | None
    num_to_share: Callable[[str], int]

    def submit(
        self,
        source: InputSource,
        spec: JobSpec,
        output: OutputFolder,
        mode: OutputMode,
        job_id: str | None = None,
        terms: Terms = NO_TERMS,
    ) -> JobRecord:
        """Submit a job that writes into `output`, or take up the one that does already (`OutputMode.RESUME`), rows of
        which whose files were removed since are made again.

        `job_id` names a new job, for callers that must know it beforehand (see `new_job_id`). `terms` are a new
        job's; one that has their `idempotency_key` is returned as it is.

        Everything that can be refused is refused before anything is written, or leaves nothing behind: raises
        `ModelError`, `ConfigError`, `SpecError`, `InputError`, `OutputNotEmpty`, `JobMismatchError`, `SinkError`,
        `QuotaExceeded`.
        """
        planner = make_planner(spec, self.shard_rows, sort_folder=self.jobs_folder)
        spec = planner.spec
        renderer = planner.check(source)
        fingerprint = spec.fingerprint(source.fingerprint() + images_fingerprint(source, spec.image))
        if (job := self._job_of_key(terms, fingerprint, spec)) is not None:
            return self._made_whole(job, source) if mode is OutputMode.RESUME else job
        self._check_terms(terms)
        num_workers = self.num_to_share(shard_queue(spec.model, spec.precision))
        planned = _planned(planner, source, renderer, num_workers, terms.sink)
        if mode is OutputMode.OVERWRITE:
            owner = owner_of(output)
            _expect_replaceable(output, source)
            # What there is goes only when all is known of what comes, which may take long.
            with planned as plan:
                expect_owner(output, owner)
                return self._submit(nullcontext(plan), fingerprint, spec, output, mode, job_id, terms)
        job = self._submit(planned, fingerprint, spec, output, mode, job_id, terms)
        return self._made_whole(job, source) if mode is OutputMode.RESUME else job

    def _submit(
        self,
        planned: AbstractContextManager[Plan],
        fingerprint: str,
        spec: JobSpec,
        output: OutputFolder,
        mode: OutputMode,
        job_id: str | None,
        terms: Terms,
    ) -> JobRecord:
        """Take the folder, and plan the job if it is not planned already."""
        replaced = self._owners.cancel_owner(output) if mode is OutputMode.OVERWRITE else None
        had_folder = output.exists()
        manifest = prepare_output_dir(output, mode, replaced)
        job_id = manifest.job_id if manifest else job_id or new_job_id()
        with self._owners.submitting(job_id, output):
            if manifest is None:
                write_manifest(output, Manifest(job_id, fingerprint, self.ledger.identity))
                self._owners.cancel_homeless(output)
            elif (job := self._owners.resumed(manifest, fingerprint, spec, output)) is not None:
                return job
            taken = _Taken(job_id, output, self.jobs_folder / job_id, had_folder)
            try:
                with planned as plan:
                    return self._create(taken, fingerprint, spec, plan, terms)
            except (InputError, SinkError, QuotaExceeded):
                # What only reading the input to its end can tell, its columns or its tokens.
                taken.give_back()
                raise

    def _made_whole(self, job: JobRecord, source: InputSource) -> JobRecord:
        """A job; one that has completed runs again for the rows whose files are gone. Raises as `submit`."""
        if job.state is not JobState.COMPLETED:
            return job
        output = open_folder(job.output_dir)
        # Nobody else does the same meanwhile: rows would be there twice.
        with self._owners.submitting(job.id, output):
            # Somebody may have done so by now, or replaced the data set.
            is_whole = owner_of(output) != job.id or self.ledger.job(job.id).state is not JobState.COMPLETED
            if not is_whole and (lost := LostRows.of(self.ledger, job)) is not None:
                self._make_again(job, lost, source, output)
        return self.ledger.job(job.id)

    def _make_again(self, job: JobRecord, lost: LostRows, source: InputSource, output: OutputFolder) -> None:
        if not source.has_fixed_rows:
            gone = f"{output}/{lost.parts[0].file_name}" if lost.parts else f"a part of {output}"
            problem = f"{gone} is gone, and input {source.name} may have other rows by now"
            raise JobMismatchError(problem, ": pass ", OutputMode.OVERWRITE.argument, " to run all again")
        # With prompts as they were, whatever the time is that a template asks for.
        planner = make_planner(read_stored(JobSpec, job.spec), self.shard_rows, sort_folder=self.jobs_folder)
        # Where the others were, whatever data folder this is.
        spool = self.ledger.spool_folder(job.id) or self.jobs_folder / job.id
        # Who is late to finish the job removes nothing meanwhile.
        with held_lock(lost_lock_of(spool), self.ledger.identity):
            with planner.plan(source, num_workers=self.num_to_share(job.queue)) as plan:
                shards = plan.spool_some(spool, lost.are_lost, first=len(self.ledger.shards(job.id)))
            plan_anew(spool, job.num_rows, {shard.number: Path(shard.spool_path) for shard in shards})
            # First, as a retry does.
            complete_manifest(output, Manifest(job.id, job.fingerprint), dict)
            is_again = self.ledger.retry_job(job.id, shards, lost.parts)
        if is_again:
            ring_for_shards(self.app, job.queue, [shard_id_of(job.id, shard.number) for shard in shards])

    def discard_abandoned(self) -> None:
        """Remove what submitters that were killed have left; for once in a while."""
        self._owners.discard_abandoned()

    @property
    def _owners(self) -> OutputOwners:
        return OutputOwners(self.ledger, self.app, self.jobs_folder)

    def _check_terms(self, terms: Terms) -> None:
        """Raises `QuotaExceeded`, `SinkError`."""
        # Once before the work, and again with the job's tokens when it is recorded.
        self.ledger.check_quota(terms.tenant, terms.quota)
        if terms.sink is not None:
            check_reachable(terms.sink)

    def _job_of_key(self, terms: Terms, fingerprint: str, spec: JobSpec) -> JobRecord | None:
        """Raises `JobMismatchError` when another job has the key."""
        if (key := terms.idempotency_key) is None or (job := self.ledger.job_of_key(key, terms.tenant)) is None:
            return None
        other = difference(job, spec) if job.fingerprint != fingerprint else self._other_terms(job, terms)
        if other is not None:
            raise JobMismatchError(f"idempotency key {key!r} belongs to job {job.id} with {other}: choose another")
        return job

    def _other_terms(self, job: JobRecord, terms: Terms) -> str | None:
        """Which terms a job has not that whoever asks for them would wait for in vain."""
        urls = self.ledger.webhooks.urls_of_job(job.id)
        sink = None if terms.sink is None else terms.sink.as_dict()
        others = {
            "webhook": urls != ([] if terms.webhook is None else [terms.webhook.url]),
            "sink": job.sink != sink,
        }
        names = [name for name, is_other in others.items() if is_other]
        return f"another {', '.join(names)}" if names else None

    def _create(self, taken: _Taken, fingerprint: str, spec: JobSpec, plan: Plan, terms: Terms) -> JobRecord:
        """Spool, then record, then ring: whatever is killed in between, who resumes finds it consistent."""
        queue = shard_queue(spec.model, spec.precision)
        shards = plan.spool(taken.spool)
        job = NewJob(
            id=taken.job_id,
            queue=queue,
            model=spec.model,
            output_dir=str(taken.output),
            fingerprint=fingerprint,
            num_rows=plan.num_rows,
            spec=spec.stored(),
            num_planned_errors=plan.num_errors,
            within_seconds=terms.within_seconds,
            idempotency_key=terms.idempotency_key,
            sink=None if terms.sink is None else terms.sink.as_dict(),
            webhook=terms.webhook,
            priority=terms.priority,
            tenant=terms.tenant,
            answer_tokens=plan.answer_tokens,
            **asdict(plan.sharing),
        )
        try:
            self.ledger.create_job(job, shards, terms.quota)
        except QuotaExceeded:
            raise
        except LedgerError:
            # Of two with one key that came at the same time, the other may have been recorded first; or it is this
            # one, and only the answer was lost.
            if (first := self._job_of_key(terms, fingerprint, spec)) is None:
                raise
            if first.id != taken.job_id:
                taken.give_back()
                return first
        ring_for_shards(self.app, queue, [shard_id_of(taken.job_id, shard.number) for shard in shards])
        return self.ledger.job(taken.job_id)


def new_job_id() -> str:
    return f"job_{uuid.uuid4().hex[:16]}"


@contextmanager
def _planned(
    planner: Planner, source: InputSource, renderer: PromptRenderer, num_workers: int, sink: SinkSpec | None
) -> Iterator[Plan]:
    """The plan, and the sink made ready for it. Raises as `Planner.plan`, and `SinkError`."""
    with planner.plan(source, renderer, num_workers) as plan:
        if sink is not None:
            SqlSink(sink, part_schema(planner.spec, carried_fields(plan.schema))).prepare()
        yield plan


def _expect_replaceable(output: OutputFolder, source: InputSource) -> None:
    """As far as it can be told before the job is planned that is to replace what is in a folder.

    Raises `OutputNotEmpty`, and `InputError` where the rows that are to be read would be removed.
    """
    if output.exists():
        expect_removable(output)
    if any(has_file(output, file.address) for file in source.files):
        problem = f"input {source.name} is in the output folder {output}, which "
        raise InputError(problem, OutputMode.OVERWRITE.argument, " would empty: choose another output")
