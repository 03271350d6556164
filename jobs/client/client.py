"""Submit jobs and ask for answers: the Python face, and what the command line is made of."""

import difflib
import json
import math
import uuid
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from inspect import signature
from numbers import Real
from pathlib import Path
from typing import Any

from ...engine.checkpoints.hub import model_name
from ...engine.errors import shown
from ...engine.lora_request import LoRARequest
from ...storage.errors import Argument, InputError, StorageError
from ...storage.files import remove_old, write_lines
from ...storage.output.address import open_folder
from ...storage.output.manifest import OutputMode
from ...storage.output.sinks import DEFAULT_TABLE, SinkSpec
from ...storage.readers import InputSource, open_input
from ...storage.readers.tables import ArrowStream, is_table, write_table
from ...storage.rows.columns import as_text
from ..broker.celery_app import shard_queue
from ..errors import SpecError
from ..live.asking import Generated, LiveStreams, Messages, live_spec, new_request, request_of
from ..live.cancellations import Cancellations
from ..live.requests import DEFAULT_TIMEOUT_SECONDS, LiveRequest, LiveRequests
from ..outside.webhooks import expect_public_receiver, optional_webhook
from ..planning.producer import NO_TERMS, Producer, Terms
from ..results.row_events import RowEvents, StoredRow, WatchedOutputs
from ..spec.durations import MAX_WITHIN_SECONDS
from ..spec.lora import as_fields
from ..spec.priority import checked_priority
from ..spec.sampling import SamplingSpec
from ..spec.schemas import JobSpec
from ..streams.events import StreamEvent
from ..streams.keys import is_request
from ..streams.reader import afollow
from ..streams.row_watch import RowWatch
from .connections import Connections
from .job import Job as Job
from .job import JobTimeoutError as JobTimeoutError

# What is written there is read within hours: what is older a submitter that was killed has left.
_OLD_INPUT_SECONDS = 24 * 3600.0
# Types of pandas, which is not imported for them.
_LACKING = ("NAType", "NaTType")
# What errors call an input that is no file.
_GIVEN = "of rows"
_INPUTS = 'a path, a URL, a DataFrame or another table of Arrow, or rows as mappings such as {"text": "…"}'
Input = str | Path | InputSource | ArrowStream | Iterable[Mapping[str, Any]]
# numpy's kinds of types: whether, how many, how much.
_NUMPY_NUMBERS = tuple("biuf")


class Client(Connections):
    """Submits jobs and asks for answers. A context manager; its settings and errors are those of `Connections`."""

    _has_tidied = False

    def submit(
        self,
        input: Input,
        model: str | Path,
        output: str | Path,
        *,
        prompt: str | None = None,
        system: str | None = None,
        choices: Sequence[str | int] | None = None,
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
        vote: bool = False,
        webhook: str | None = None,
        webhook_secret: str | None = None,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        image: str | None = None,
        **sampling: Any,
    ) -> Job:
        """Queue a job over `input`, which writes into `output`: a folder, or a URL that fsspec can write to.

        `model`: a folder, a GGUF file, or a Hugging Face id, whose `revision` is a branch (default: main), a tag or a
        commit. `input`: a path or URL (see `open_input`), an open source (`open_sql`), rows as mappings, or a
        table whose columns keep their types: a DataFrame of pandas or polars, what DuckDB or pyarrow has, a `Dataset`.
        `prompt` is a template over the columns (`"{text}"`); without one rows bring `messages`. `sampling` takes
        the fields of `SamplingSpec` (`temperature`, `max_tokens`, `stop`, …). `mode`: `new`, `resume` or `overwrite`.
        Rows without an answer `within_seconds` expire. The job that was submitted with the same
        `idempotency_key` is returned instead of a second one. The rows are also written into a `sink`, the URL of a
        PostgreSQL database or SQLite file, where `sink_table` is made if there is none. With `cache` answers that
        earlier such jobs have given to the same prompts are taken (column `from_cache`), and new ones kept. With
        `vote` a row's answer is what most of its `n` samples say. The job's end is told to the URL `webhook`, signed
        with `webhook_secret`; workers and servers do so. Jobs with a higher `priority` are begun before it.
        `lora_request`: the LoRA adapter to answer with, in a folder that workers see too. `chat_template_kwargs`: what
        the model's chat template is told, such as `{"enable_thinking": False}`. `tools`: functions as OpenAI's API
        describes them, which the template shows the model: its calls are in the column `tool_calls`. `tool_choice`:
        "auto", "none", "required", or {"type": "function", "function": {"name": …}}, as there; without
        `parallel_tool_calls` an answer has one call at most. `image`: the column of a row's image, or images: bytes,
        {"bytes", "path"} as Hugging Face's data sets have them, paths of files, or data URLs.
        Raises what `Producer.submit` raises; a single bad row becomes an error row instead.
        """
        _expect_options(sampling)
        spec = JobSpec.parse(
            model=model_name(model, revision),
            dtype=dtype,
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
            system=system,
            prompt=prompt,
            choices=choices,
            sampling=sampling,
            limit=limit,
            cache=cache,
            vote=vote,
            chat_template_kwargs=chat_template_kwargs,
            tools=tools,
            tool_choice=tool_choice,
            parallel_tool_calls=parallel_tool_calls,
            lora=as_fields(lora_request),
            image=image,
        )
        terms = Terms(
            _checked_seconds(within_seconds),
            idempotency_key,
            None if sink is None else SinkSpec.parse(sink, sink_table),
            optional_webhook(webhook, webhook_secret),
            checked_priority(priority),
        )
        output_mode = _checked_mode(mode)
        with self._opened(input, spec.limit) as source:
            return self.submit_spec(source, spec, output, output_mode, terms=terms)

    @contextmanager
    def _opened(self, input: Input, limit: int | None) -> Iterator[InputSource]:
        if isinstance(input, InputSource):
            yield input
        elif isinstance(input, str | Path):
            yield open_input(input, limit)
        else:
            with self.rows_file(input) as path:
                yield open_input(path, limit, _GIVEN)

    def submit_spec(
        self,
        source: InputSource,
        spec: JobSpec,
        output: str | Path,
        mode: OutputMode,
        job_id: str | None = None,
        terms: Terms = NO_TERMS,
    ) -> Job:
        """Queue a job that is described already; see `submit`."""
        if terms.webhook is not None:
            expect_public_receiver(terms.webhook, self.settings)
        # Before anything is written: without Redis nobody could work on it.
        self.ping_redis()
        producer = Producer(self.ledger, self._app, self.jobs_folder, self.settings.shard_rows, self._num_to_share)
        if not self._has_tidied:
            self._has_tidied = True
            producer.discard_abandoned()
            remove_old(self.settings.inputs_folder, _OLD_INPUT_SECONDS)
        return Job(self, producer.submit(source, spec, open_folder(output), mode, job_id, terms))

    @contextmanager
    def rows_file(self, rows: Any) -> Iterator[Path]:
        """Mappings as a JSONL file, a table as Parquet, for as long as it takes to submit them.

        Raises InputError where they are neither, StorageError.
        """
        folder = self.settings.inputs_folder
        path = folder / f"{uuid.uuid4().hex}.{'parquet' if is_table(rows) else 'jsonl'}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"cannot write into {folder}: {error.strerror or error}") from error
        try:
            if is_table(rows):
                write_table(path, rows, _GIVEN)
            else:
                # As JSON has it by itself, all is ASCII: half of a surrogate pair is that row's error.
                write_lines(path, (json.dumps(_plain(each), default=as_text) for each in _mappings(rows)))
            yield path
        finally:
            path.unlink(missing_ok=True)

    def job(self, job_id: str) -> Job:
        """Raises `UnknownJob`."""
        return Job(self, self.ledger.job(job_id))

    def jobs(self, limit: int = 20) -> list[Job]:
        """The newest first."""
        return [Job(self, record) for record in self.ledger.jobs(limit)]

    @cached_property
    def live(self) -> LiveRequests:
        """Interactive requests, for those who describe them themselves."""
        return self._stack.enter_context(LiveRequests(self.redis_url, self._app, self.settings.stream_ttl_seconds))

    @cached_property
    def _streams(self) -> LiveStreams:
        return LiveStreams(self.redis_url, self.live)

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
        self,
        prompt: str | Messages,
        model: str | Path,
        *,
        start_worker: bool = True,
        system: str | None = None,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        **options: Any,
    ) -> Generated:
        """Answer one prompt, ahead of all jobs; starts a worker for that time if its queue has none.

        `options` as for `ask`. Raises what that does, `GenerationError` when there is no answer, and
        `WorkerFailedError` when the worker can not run.
        """
        spec = live_spec(model, **options)
        request = request_of(spec, prompt, system, timeout_seconds)
        self.ensure_redis()
        queue = shard_queue(spec.model, spec.precision)
        with self.workers_for(queue, spec.worker_options, request.id) as workers, self._wanted(request):
            self.live.submit(request)
            answer = self._streams.collect(request, partial(workers.tick, 0) if start_worker else None)
        # Nobody looks for what a worker that has answered wrote. The answer counts whether or not it can be removed.
        self.remove_logs(request.id)
        return answer

    @contextmanager
    def _wanted(self, request: LiveRequest) -> Iterator[None]:
        """Call a request off, whose id is nobody's to know, unless its answer is waited for to the end."""
        try:
            yield
        except BaseException:
            self._cancellations.add([request])
            raise

    @cached_property
    def _cancellations(self) -> Cancellations:
        return self._stack.enter_context(Cancellations(self.live))

    def stream(self, stream_id: str, after: int = 0) -> Iterator[StreamEvent]:
        """The tokens of an answer as they come: of a request, of its sample k (`ID/k`) or of a job's row (`JOB/ROW`).

        Begins after the token `after` and ends with the answer; of a row that is stored by now its text comes at once.
        Raises `UnknownRequest`, `UnknownJob`, `SpecError` when the job has no such row, and `GenerationError` when no
        worker has taken the request in time (`deadline_exceeded`), the answer has ended and Redis has lost its end
        (`stream_lost`), or Redis takes nothing in (`unavailable`); that one may be followed again later.
        """
        if is_request(stream_id):
            return self._streams.follow(stream_id, after)
        return self._row_events(stream_id, after).events(self.redis_url)

    def astream(self, stream_id: str, after: int = 0) -> AsyncIterator[StreamEvent]:
        """As `stream`, for `async for`."""
        if is_request(stream_id):
            return self._streams.afollow(stream_id, after)
        url = self.redis_url
        events = self._row_events(stream_id, after)
        return events.aevents(lambda stream, last, seconds: afollow(url, stream, last, timeout=seconds))

    def _row_events(self, stream_id: str, after: int) -> RowEvents:
        job_id, _, number = stream_id.partition("/")
        row, num_rows = int(number) if number.isdecimal() else None, self.job(job_id).record.num_rows
        if row is None or row >= num_rows:
            raise SpecError(f"job {job_id} has no row {number!r}: name one as {job_id}/ROW, from 0 to {num_rows - 1}")
        return RowEvents(self._row_watch, StoredRow(WatchedOutputs(self.ledger), job_id, row), after)

    @cached_property
    def _row_watch(self) -> RowWatch:
        return self._stack.enter_context(RowWatch(self.redis_url))


def _expect_options(sampling: Mapping[str, Any]) -> None:
    """Raises `SpecError` for one that there is not, with the name that may have been meant."""
    # Without the client itself, and what takes any name.
    _, *named, _ = signature(Client.submit).parameters
    known = [*named, *SamplingSpec.model_fields]
    for name in (each for each in sampling if each not in SamplingSpec.model_fields):
        near = difflib.get_close_matches(name, known, n=1)
        raise SpecError(Argument(name), f": there is no such option{f': did you mean {near[0]}?' if near else ''}")


def _checked_seconds(within: Any) -> float | None:
    """Raises `SpecError`."""
    if within is None:
        return None
    is_number = isinstance(within, Real) and not isinstance(within, bool)
    if is_number and 0 < within <= MAX_WITHIN_SECONDS:
        return float(within)
    problem = f" must be a number above 0, and at most {MAX_WITHIN_SECONDS} (366 days), not {shown(within)}"
    raise SpecError(Argument("within_seconds"), problem)


def _checked_mode(mode: OutputMode | str) -> OutputMode:
    """Raises `SpecError`."""
    try:
        return OutputMode(mode)
    except ValueError as error:
        raise SpecError(Argument("mode"), f" must be one of {', '.join(OutputMode)}, not {shown(mode)}") from error


def _mappings(rows: Any) -> Iterator[Mapping[Any, Any]]:
    """Raises `InputError` where they are none. The elements of a mapping would be the names of its columns."""
    if not isinstance(rows, Iterable) or isinstance(rows, Mapping):
        raise InputError(f"the input is of the type {type(rows).__name__}: give {_INPUTS}")
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise InputError(f"row {number} of the input is of the type {type(row).__name__}: give {_INPUTS}")
        yield row


def _plain(value: Any) -> Any:
    """As JSON has it, without what pandas has where there is nothing, and numpy's numbers and arrays as Python's."""
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple) or (type(value).__name__ == "ndarray" and value.ndim):
        return [_plain(each) for each in value]
    # Times stay what they are, as Python's have no nanoseconds.
    if getattr(value, "ndim", None) == 0 and getattr(value.dtype, "kind", None) in _NUMPY_NUMBERS:
        value = value.item()
    is_nan = isinstance(value, float) and math.isnan(value)
    return None if is_nan or type(value).__name__ in _LACKING else value
