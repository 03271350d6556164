"""Submit jobs, follow them, read their results: the Python face, and what the command line is made of."""

import json
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self, TypeVar

import pyarrow as pa
import pyarrow.dataset as ds
from celery import Celery

from ..engine.hub import model_name
from ..storage.errors import LedgerUnavailable
from ..storage.ledger import Ledger
from ..storage.output_dir import OutputMode, local_folder
from ..storage.parts import committed_file
from ..storage.readers import InputSource, open_input
from ..storage.records import JobRecord, JobState, Progress
from ..storage.sinks import DEFAULT_TABLE, SinkSpec
from .celery_app import create_app, send_shards, shard_queue
from .embedded.valkey import redis_urls
from .errors import JobError
from .live.asking import Generated, LiveStreams, Messages, new_request
from .live.requests import LiveRequests
from .local_worker import LocalWorker
from .open_ledger import open_ledger
from .planning.producer import NO_TERMS, Producer, Terms
from .precision import Precision
from .presence import WorkerPresence
from .schemas import JobSpec
from .settings import Settings
from .streams.events import StreamEvent
from .verbs import cancel_job, delete_job, retry_job
from .webhooks import parse_webhook

T = TypeVar("T")
_POLL_SECONDS = 0.25
_MAX_READS = 5


class JobTimeoutError(JobError, TimeoutError):
    """A job did not end in the time given."""


class Client:
    """Talks to the ledger and to Redis, the embedded ones unless configured. A context manager.

    `settings` default to the environment's (`HEADRACE_*`). Raises `SettingsError`, `EmbeddedValkeyError` or
    `LedgerError`.
    """

    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = settings or Settings.from_environment()
        self._stack = ExitStack()
        with ExitStack() as stack:
            self.ledger = stack.enter_context(open_ledger(self.settings))
            self._redis = stack.enter_context(redis_urls(self.settings))
            self._presence = stack.enter_context(WorkerPresence(self._redis.redis))
            self._app = create_app(self._redis.broker)
            stack.callback(self._app.close)
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        self._stack.close()

    def submit(
        self,
        input: str | Path | InputSource | Iterable[Mapping[str, Any]],
        model: str | Path,
        output: str | Path,
        *,
        prompt: str | None = None,
        system: str | None = None,
        choices: Sequence[str] | None = None,
        dtype: str = "auto",
        quantization: str | None = None,
        kv_cache_dtype: str = "auto",
        revision: str | None = None,
        limit: int | None = None,
        mode: OutputMode | str = OutputMode.NEW,
        within_seconds: float | None = None,
        idempotency_key: str | None = None,
        sink: str | None = None,
        sink_table: str = DEFAULT_TABLE,
        cache: bool = False,
        webhook: str | None = None,
        webhook_secret: str | None = None,
        **sampling: Any,
    ) -> "Job":
        """Queue a job over `input`, which writes into `output`.

        `model`: a folder, or a Hugging Face id, whose `revision` is a branch (default: main), a tag or a commit.
        `input`: a path or URL (see `open_input`), an open source (`open_sql`), or rows as mappings.
        `prompt` is a template over the columns (`"{text}"`); without one rows bring `messages`. `sampling` takes
        the fields of `SamplingSpec` (`temperature`, `max_tokens`, `stop`, …). `mode`: `new`, `resume` or `overwrite`.
        Rows without an answer `within_seconds` expire. The job that was submitted with the same
        `idempotency_key` is returned instead of a second one. The rows are also written into a `sink`, the URL of a
        PostgreSQL database or SQLite file, where `sink_table` is made if there is none. With `cache` answers that
        earlier such jobs have given to the same prompts are taken (column `from_cache`), and new ones kept. The job's
        end is told to the URL `webhook`, signed with `webhook_secret`; workers and servers do so.
        Raises what `Producer.submit` raises; a single bad row becomes an error row instead.
        """
        spec = JobSpec.parse(
            model=model_name(model, revision),
            dtype=dtype,
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
            system=system,
            prompt=prompt,
            choices=tuple(choices) if choices is not None else None,
            sampling=sampling,
            limit=limit,
            cache=cache,
        )
        terms = Terms(
            within_seconds,
            idempotency_key,
            None if sink is None else SinkSpec.parse(sink, sink_table),
            None if webhook is None else parse_webhook(webhook, webhook_secret),
        )
        with self._opened(input, limit) as source:
            return self.submit_spec(source, spec, Path(output), OutputMode(mode), terms=terms)

    @contextmanager
    def _opened(
        self, input: str | Path | InputSource | Iterable[Mapping[str, Any]], limit: int | None
    ) -> Iterator[InputSource]:
        if isinstance(input, InputSource):
            yield input
        elif isinstance(input, str | Path):
            yield open_input(input, limit)
        else:
            with self.rows_file(input) as path:
                yield open_input(path, limit)

    def submit_spec(
        self,
        source: InputSource,
        spec: JobSpec,
        output: Path,
        mode: OutputMode,
        job_id: str | None = None,
        terms: Terms = NO_TERMS,
    ) -> "Job":
        """Queue a job that is described already; see `submit`."""
        # Before anything is written: a job that cannot be rung for would lie there until somebody resumes it.
        self.ping_redis()
        producer = Producer(self.ledger, self._app, self.jobs_folder, self.settings.shard_rows)
        return Job(self, producer.submit(source, spec, local_folder(output), mode, job_id, terms))

    @property
    def redis_url(self) -> str:
        return self._redis.redis

    @property
    def celery(self) -> Celery:
        """The application that rings for workers."""
        return self._app

    @property
    def jobs_folder(self) -> Path:
        """Where the jobs' spools are."""
        return self.settings.data_dir / "jobs"

    def ring(self, job: "Job", shard_ids: Sequence[str]) -> None:
        """Send workers a message for each of these shards of a job. Raises kombu's `OperationalError`."""
        self.ensure_redis()
        send_shards(self._app, job.record.queue, shard_ids)

    @contextmanager
    def rows_file(self, rows: Iterable[Mapping[str, Any]]) -> Iterator[Path]:
        """Rows as a JSONL file, for as long as it takes to submit them."""
        folder = self.settings.data_dir / "inputs"
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".jsonl", encoding="ascii") as file:
            for row in rows:
                # ASCII: half of a surrogate pair is that row's error, not the whole submission's.
                file.write(json.dumps(dict(row), default=str) + "\n")
            file.flush()
            yield Path(file.name)

    def job(self, job_id: str) -> "Job":
        """Raises `UnknownJob`."""
        return Job(self, self.ledger.job(job_id))

    def jobs(self, limit: int = 20) -> list["Job"]:
        """The newest first."""
        return [Job(self, record) for record in self.ledger.jobs(limit)]

    def local_worker(self, job: "Job", options: Sequence[str] = ()) -> LocalWorker:
        """A worker for the job's queue, to be started if there is none; `options` are those of `headrace worker`."""
        spec = job.spec
        return self._worker_for(job.record.queue, spec.model, spec.precision, options, job.id)

    def _worker_for(
        self, queue: str, model: str, precision: Precision, options: Sequence[str], name: str
    ) -> LocalWorker:
        log = self.settings.data_dir / "logs" / f"worker-{name}.log"
        command = ["--model", model, *precision.worker_options, *options]
        return LocalWorker(self._presence, queue, command, log, self.settings.environment())

    @cached_property
    def live(self) -> LiveRequests:
        """Interactive requests, for those who describe them themselves."""
        return self._stack.enter_context(LiveRequests(self._redis.redis, self._app, self.settings.stream_ttl_seconds))

    @cached_property
    def _streams(self) -> LiveStreams:
        return LiveStreams(self._redis.redis, self.live)

    def ask(self, prompt: str | Messages, model: str | Path, **options: Any) -> str:
        """Queue one prompt ahead of all jobs and return its id, for `stream`.

        `options` are those of `new_request`: `system`, `choices`, `timeout_seconds`, …, and the fields of
        `SamplingSpec`. Raises `SpecError` or `InvalidRequestError` naming the field at fault, `ModelError`.
        """
        request = new_request(prompt, model, **options)
        self.ensure_redis()
        self.live.submit(request)
        return request.id

    def generate(
        self, prompt: str | Messages, model: str | Path, *, start_worker: bool = True, **options: Any
    ) -> Generated:
        """Answer one prompt, ahead of all jobs; starts a worker for that time if its queue has none.

        `options` as for `ask`. Raises what that does, `GenerationError` when there is no answer, and
        `WorkerFailedError` when the worker can not run.
        """
        request = new_request(prompt, model, **options)
        self.ensure_redis()
        self.live.submit(request)
        precision = Precision(**{name: options[name] for name in Precision._fields if name in options})
        queue = shard_queue(request.model, *precision)
        with self._worker_for(queue, request.model, precision, (), request.id) as worker:
            return self._streams.collect(request, partial(worker.tick, 0) if start_worker else None)

    def stream(self, stream_id: str, after: int = 0) -> Iterator[StreamEvent]:
        """The tokens of an answer as they come: of a request, of its sample k (`ID/k`) or of a job's row (`JOB/ROW`).

        Begins after the token `after` and ends with the answer. Raises `UnknownRequest`, `StreamIdError`.
        """
        return self._streams.follow(stream_id, after)

    def astream(self, stream_id: str, after: int = 0) -> AsyncIterator[StreamEvent]:
        """As `stream`, for `async for`."""
        return self._streams.afollow(stream_id, after)

    def ensure_redis(self) -> None:
        """Bring the embedded server back should it be gone."""
        self._redis.ensure()

    def ping_redis(self) -> None:
        """Raises redis' errors, or `EmbeddedValkeyError`, unless Redis answers."""
        self.ensure_redis()
        self._presence.ping()

    def ping_ledger(self) -> None:
        """Raises `LedgerError` unless the database answers."""
        self.ledger.jobs(limit=1)

    def is_served(self, job: "Job") -> bool:
        """Whether a worker that has loaded its model listens to the job's queue."""
        return self._presence.is_served(job.record.queue)


@dataclass(frozen=True)
class Job:
    """One job. `record` is what the ledger said when this object was made."""

    client: Client
    record: JobRecord

    @property
    def id(self) -> str:
        return self.record.id

    @property
    def spec(self) -> JobSpec:
        return JobSpec.model_validate(self.record.spec)

    def progress(self) -> Progress:
        """What is committed now."""
        return self.client.ledger.progress(self.id)

    def watch(self, timeout: float | None = None) -> Iterator[Progress]:
        """The progress, again and again, until the job has ended; a ledger that goes away meanwhile is waited for.

        Raises `JobTimeoutError` after `timeout` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        progress = self.progress()
        while True:
            self.client.ensure_redis()
            try:
                progress = self.progress()
            except LedgerUnavailable as error:
                progress = replace(progress, error=str(error))
            yield progress
            if progress.state.has_ended:
                return
            if deadline is not None and time.monotonic() > deadline:
                raise JobTimeoutError(f"job {self.id} did not end in {timeout} s")
            time.sleep(_POLL_SECONDS)

    def wait(self, timeout: float | None = None, start_worker: bool = True) -> Progress:
        """Until the job has ended; starts a worker for that time if its queue has none.

        Raises `JobTimeoutError`, or `WorkerFailedError` when the worker can not run.
        """
        with self.client.local_worker(self) as worker:
            for progress in self.watch(timeout):
                if start_worker and progress.state is JobState.RUNNING:
                    worker.tick(progress.rows_done)
        return progress

    def cancel(self) -> None:
        """Stop the job for good; what is committed stays. Raises `JobEnded` when it has completed."""
        cancel_job(self.client.ledger, self.id)

    def pause(self) -> None:
        """Have no more rows begun until `resume`. Raises `JobEnded`."""
        self.client.ledger.pause_job(self.id)

    def resume(self) -> None:
        """Let a paused job go on. Raises `JobEnded`."""
        self.client.ring(self, self.client.ledger.resume_job(self.id))

    def set_priority(self, priority: int) -> None:
        """Have its rows begun before those of jobs with a lower priority (default: 0). Raises `JobEnded`."""
        self.client.ledger.set_priority(self.id, priority)

    def retry(self) -> None:
        """Try the failed rows of a completed job again, in the same data set. Raises `JobError`, `StorageError`."""
        self.client.ring(self, retry_job(self.client.ledger, self.id))

    def delete(self, with_output: bool = False) -> None:
        """Forget the job, and with `with_output` remove its data set; one that has not ended is cancelled."""
        delete_job(self.client.ledger, self.client.jobs_folder, self.id, with_output)

    def results(self) -> pa.Table:
        """All rows committed so far, in the input's order."""
        return read_results(self.client.ledger, self.record)


def read_results(ledger: Ledger, job: JobRecord) -> pa.Table:
    """All rows of a job committed so far, in the input's order."""
    return read_parts(ledger, job, _sorted_rows)


def _sorted_rows(parts: ds.Dataset) -> pa.Table:
    return parts.to_table().sort_by("row") if parts.files else pa.table({})


def read_parts(ledger: Ledger, job: JobRecord, read: Callable[[ds.Dataset], T]) -> T:
    """What `read` makes of a job's committed parts, each row in them once.

    It is called again when a part was renamed or replaced under its hands.
    """
    for _ in range(_MAX_READS - 1):
        with suppress(FileNotFoundError):
            return read(_committed_parts(ledger, job))
    return read(_committed_parts(ledger, job))


def _committed_parts(ledger: Ledger, job: JobRecord) -> ds.Dataset:
    folder = Path(job.output_dir)
    files = (committed_file(folder, part.file_name) for part in ledger.parts(job.id))
    # A part may have been deleted by hand: what is there can still be read.
    return ds.dataset([str(file) for file in files if file is not None], format="parquet")


def first_error(ledger: Ledger, job: JobRecord) -> str | None:
    """The error of the first of a job's failed rows."""
    return read_parts(ledger, job, _first_error)


def _first_error(parts: ds.Dataset) -> str | None:
    if not parts.files:
        return None
    failed = parts.to_table(columns=["row", "error"], filter=ds.field("error").is_valid())
    if not len(failed):
        return None
    first = failed.sort_by("row").slice(0, 1).to_pylist()[0]
    return f"(row {first['row']}): {first['error']}"
