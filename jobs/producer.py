"""Submitting: plan the input, spool its shards, record the job, ring for a worker. Idempotent by the output folder."""

import shutil
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from celery import Celery

from ..engine.hub import locate_model
from ..engine.model_config import ModelConfig
from ..engine.tokenizer import Tokenizer
from ..storage.errors import ManifestDamaged, UnknownJob
from ..storage.ledger import Ledger
from ..storage.output_dir import Manifest, OutputMode, prepare_output_dir, read_manifest, write_manifest
from ..storage.readers import InputSource
from ..storage.records import JobRecord, JobState, NewJob, NewShard, ShardState
from ..storage.spool import write_shard
from .celery_app import send_shards, shard_queue
from .errors import JobMismatchError
from .planner import Plan, Planner
from .schemas import JobSpec


@dataclass(frozen=True)
class Producer:
    """Puts jobs on the queue. `jobs_folder` holds the spools; `shard_rows`: the most rows of a shard."""

    ledger: Ledger
    app: Celery
    jobs_folder: Path
    shard_rows: int

    def submit(
        self,
        source: InputSource,
        spec: JobSpec,
        output: Path,
        mode: OutputMode,
        job_id: str | None = None,
    ) -> JobRecord:
        """Submit a job that writes into `output`, or take up the one that does already (`OutputMode.RESUME`).

        `job_id` names a new job, for callers that must know it beforehand (see `new_job_id`).

        Everything that can be refused is refused before anything is written: raises `ModelError`, `SpecError`,
        `InputError`, `OutputNotEmpty`, `JobMismatchError`.
        """
        located = locate_model(spec.model, with_weights=False)
        # With the commit that a branch is at now: every attempt at the job has the same weights.
        spec = spec.model_copy(update={"model": located.name})
        planner = Planner(
            spec,
            ModelConfig.from_pretrained(located.folder),
            Tokenizer.from_pretrained(located.folder),
            self.shard_rows,
            sort_folder=self.jobs_folder,
        )
        planner.check(source)
        fingerprint = spec.fingerprint(source.fingerprint())
        if mode is OutputMode.OVERWRITE:
            self._cancel_owner(output)
        manifest = prepare_output_dir(output, mode)
        if manifest is not None and (job := self._resumed(manifest, fingerprint, spec, output)) is not None:
            return job
        job_id = manifest.job_id if manifest else job_id or new_job_id()
        if manifest is None:
            write_manifest(output, Manifest(job_id, fingerprint))
        with planner.plan(source) as plan:
            return self._create(job_id, fingerprint, spec, plan, output)

    def _cancel_owner(self, output: Path) -> None:
        """Keep the workers of the job that is about to be replaced from writing on."""
        # Unreadable, written with another ledger, or killed before it was recorded: nobody works on it here.
        with suppress(ManifestDamaged, UnknownJob):
            if (manifest := read_manifest(output)) is not None:
                self.ledger.cancel_job(manifest.job_id)
                shutil.rmtree(self.jobs_folder / manifest.job_id, ignore_errors=True)

    def _resumed(self, manifest: Manifest, fingerprint: str, spec: JobSpec, output: Path) -> JobRecord | None:
        """The job of an output folder, rung for again; None when it was killed before it was recorded."""
        try:
            job = self.ledger.job(manifest.job_id)
        except UnknownJob as error:
            if any(output.glob("part-*.parquet")):
                raise JobMismatchError(
                    f"output folder {output} was written with another ledger: set HEADRACE_DATA_DIR or "
                    "HEADRACE_DATABASE_URL as it was then, or pass --overwrite"
                ) from error
            job = None
        if manifest.fingerprint != fingerprint:
            raise JobMismatchError(
                f"output folder {output} belongs to a job with {_difference(job, spec)}: "
                "resume with the same input and options, or pass --overwrite"
            )
        if job is not None:
            self._ring_again(job)
        return job

    def _ring_again(self, job: JobRecord) -> None:
        """Raises `JobMismatchError` when resuming would not complete the data set."""
        if job.state is JobState.CANCELLED:
            raise JobMismatchError(f"job {job.id} of output folder {job.output_dir} was cancelled: pass --overwrite")
        shards = self.ledger.shards(job.id)
        done = {shard.id for shard in shards if shard.state is ShardState.DONE}
        for part in self.ledger.parts(job.id):
            if part.shard_id in done and not (path := Path(job.output_dir, part.file_name)).exists():
                raise JobMismatchError(f"{path} is gone and its rows were done: pass --overwrite to run all again")
        queued = [shard.id for shard in shards if shard.state is ShardState.QUEUED]
        send_shards(self.app, job.queue, queued)
        self.ledger.mark_enqueued(queued)

    def _create(self, job_id: str, fingerprint: str, spec: JobSpec, plan: Plan, output: Path) -> JobRecord:
        """Spool, then record, then ring: whatever is killed in between, `--resume` finds it consistent."""
        queue = shard_queue(spec.model, spec.dtype, spec.quantization)
        spool = self.jobs_folder / job_id
        shutil.rmtree(spool, ignore_errors=True)
        shards = []
        for number, rows in enumerate(plan.shards()):
            path = spool / f"shard-{number:05d}.parquet"
            write_shard(path, rows, plan.schema)
            shards.append(NewShard(number, len(rows), str(path)))
        job = NewJob(
            id=job_id,
            queue=queue,
            model=spec.model,
            output_dir=str(output),
            fingerprint=fingerprint,
            num_rows=plan.num_rows,
            spec=spec.model_dump(mode="json"),
            num_planned_errors=plan.num_errors,
            **asdict(plan.sharing),
        )
        self.ledger.create_job(job, shards)
        send_shards(self.app, queue, [shard.id for shard in self.ledger.shards(job_id)])
        return self.ledger.job(job_id)


def new_job_id() -> str:
    return f"job_{uuid.uuid4().hex[:16]}"


def _difference(job: JobRecord | None, spec: JobSpec) -> str:
    """Which options differ, in the user's words."""
    if job is None:
        return "another input or other options"
    before, asked = _options(job.spec), _options(spec.model_dump(mode="json"))
    names = [name for name, value in asked.items() if before.get(name) != value]
    return f"another {', '.join(names)}" if names else "another input"


def _options(spec: dict[str, Any]) -> dict[str, Any]:
    return {**spec, **spec["sampling"], "sampling": None}
