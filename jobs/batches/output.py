"""A batch's output and error file, from the parts of its job. Source: OpenAI's Batch API, the output of a batch."""

import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from ...storage.errors import PartMissing, StorageError
from ...storage.ledger.batch_records import BatchRecord, BatchState, BatchTotals
from ...storage.ledger.file_records import NewFile
from ...storage.ledger.ledger import Ledger
from ...storage.ledger.records import JobRecord, JobState, PartRecord, ShardRecord
from ...storage.output.address import open_folder
from ...storage.output.folder import OutputFolder
from ...storage.rows.columns import plain_rows
from ...storage.rows.spool import read_shard
from ..api.openai.answer_bodies import Answer, Head, Usage, chat_completion, text_completion
from ..api.openai.response_bodies import response
from ..calls.events import merged_calls
from ..calls.formats import CallFormat
from ..planning.rows_planner import TOO_LONG
from ..shards.deadline import EXPIRED
from ..shards.faults import is_servers
from ..spec.lora import answers_as
from ..spec.tools import TOOLS
from ..streams.events import StreamEvent
from .files import DEFAULT_EXPIRY_SECONDS, FileStore, IncomingFile
from .lines import CHAT, RESPONSES, LineError
from .requests import CALL_FORMAT, ECHO, ECHOES_ONLY, OMIT_REASONING, REQUEST_ERROR, TOLD_AGAIN

logger = logging.getLogger(__name__)

PURPOSE = "batch_output"
_ROWS = 256
_TOO_LONG = re.compile(rf"{TOO_LONG} (at least )?\d+ tokens|.*max_model_len")
_NEVER_RAN = {
    BatchState.EXPIRED: ("batch_expired", "This request was not begun before the batch expired."),
    BatchState.CANCELLED: ("batch_cancelled", "This request was not finished before the batch was cancelled."),
}


def request_number(line: bytes) -> int:
    """Which request of its batch, from 0 on, a line of an output or error file is about."""
    number: str = json.loads(line)["id"].rpartition("-")[2]
    return int(number)


@dataclass
class BatchOutput:
    """What was written: the files to be recorded, and the sums. `lost`: what could not be, as a batch's errors."""

    output: NewFile | None
    error: NewFile | None
    totals: BatchTotals
    has_expired_rows: bool
    lost: list[dict[str, Any]]


@dataclass
class OutputWriter:
    """Writes the files of a batch whose job has ended, each of its requests once. Memory does not grow with them.

    `on_row` is called now and then, and may raise. Writing them again gives the same files.
    """

    ledger: Ledger
    store: FileStore
    batch: BatchRecord
    job: JobRecord
    on_row: Callable[[], None]
    _usage: Usage = field(default_factory=Usage)
    _num_completed: int = 0
    _num_failed: int = 0
    _has_expired_rows: bool = False
    _lost: list[dict[str, Any]] = field(default_factory=list)

    def write(self) -> BatchOutput:
        """Put the files in place. Raises StorageError, `LedgerError`."""
        with ExitStack() as stack:
            output, error = (stack.enter_context(self.store.incoming()) for _ in range(2))
            self._write_done(output, error)
            if self.job.state is not JobState.COMPLETED:
                for row in self._unfinished_rows():
                    self._write_error(error, row)
            totals = BatchTotals(
                num_total=self._num_completed + self._num_failed,
                num_completed=self._num_completed,
                num_failed=self._num_failed,
                prompt_tokens=self._usage.prompt_tokens,
                cached_tokens=self._usage.cached_tokens,
                completion_tokens=self._usage.completion_tokens,
                reasoning_tokens=self._usage.reasoning_tokens,
            )
            files = self._keep(output, "output"), self._keep(error, "error")
            return BatchOutput(*files, totals, self._has_expired_rows, self._lost)

    def _write_done(self, output: IncomingFile, error: IncomingFile) -> None:
        for part in self.ledger.parts(self.job.id):
            for row in self._part_rows(part):
                self.on_row()
                if row["error"] is None:
                    self._write_answer(output, row)
                else:
                    self._write_error(error, row)

    def _part_rows(self, part: PartRecord) -> Iterator[dict[str, Any]]:
        # Parts are as small as shards.
        try:
            table = _read_part(open_folder(self.job.output_dir), part.file_name, ("messages", "prompt", TOOLS))
        except PartMissing as error:
            self._lose(part, error)
            return
        for batch in table.to_batches(_ROWS):
            yield from plain_rows(batch)

    def _lose(self, part: PartRecord, error: PartMissing) -> None:
        """Somebody has removed answers: the rest is to be had all the same."""
        logger.warning("batch %s: %s", self.batch.id, error)
        message = f"The answers to {part.num_rows} requests were removed from the server before the batch had ended."
        self._lost.append(LineError("output_lost", message).as_dict())
        # Of another job's end they are among those that no part has.
        if self.job.state is JobState.COMPLETED:
            self._num_failed += part.num_rows

    def _write_answer(self, file: IncomingFile, row: Mapping[str, Any]) -> None:
        num_generated = 0 if row.get(ECHOES_ONLY) else row["completion_tokens"]
        num_thought = row.get("reasoning_tokens") or 0
        usage = Usage(row["prompt_tokens"], row["cached_tokens"], num_generated, num_thought)
        self._usage += usage
        self._num_completed += 1
        request_id = self._request_id(row)
        answers = _answers(row)
        if (calls := row.get(CALL_FORMAT)) is not None:
            form = CallFormat.from_json(calls)
            answers = [_with_calls(answer, form, f"{request_id}/{index}") for index, answer in enumerate(answers)]
        if self.batch.endpoint == CHAT:
            body = chat_completion(self._head(Head.chat, request_id), answers, usage)
        elif self.batch.endpoint == RESPONSES:
            told_again = json.loads(row[TOLD_AGAIN])
            body = response(self._head(Head.response, request_id), told_again, answers[0], usage)
        else:
            body = text_completion(self._head(Head.text, request_id), answers, usage)
        self._write(file, row, {"response": _response(200, request_id, body), "error": None})

    def _head(self, make: Callable[[str, str, str], Head], request_id: str) -> Head:
        lora = self.job.spec.get("lora") or {}
        head = make(request_id, self.batch.model or "", answers_as(self.job.model, lora.get("path")))
        return replace(head, created=int(self.job.finished_at or self.job.created_at))

    def _write_error(self, file: IncomingFile, row: Mapping[str, Any]) -> None:
        self._num_failed += 1
        self._write(file, row, self._error(row))

    def _error(self, row: Mapping[str, Any]) -> dict[str, Any]:
        text = row["error"]
        if text is None or text.startswith(EXPIRED):
            self._has_expired_rows |= text is not None
            ending = BatchState.EXPIRED if text is not None else self.batch.ending or BatchState.CANCELLED
            code, message = _NEVER_RAN[ending]
            return {"response": None, "error": {"code": code, "message": message}}
        if is_servers(text):
            detail = {"message": text, "type": "server_error", "param": None, "code": "server_error"}
            return {"response": _response(500, self._request_id(row), {"error": detail}), "error": None}
        detail = {"type": "invalid_request_error", **self._fault(row)}
        return {"response": _response(400, self._request_id(row), {"error": detail}), "error": None}

    def _fault(self, row: Mapping[str, Any]) -> dict[str, Any]:
        if (known := row.get(REQUEST_ERROR)) is not None:
            fault: dict[str, Any] = json.loads(known)
            return fault
        prompt = {CHAT: "messages", RESPONSES: "input"}.get(self.batch.endpoint, "prompt")
        code = "context_length_exceeded" if _TOO_LONG.match(row["error"]) else "invalid_value"
        return {"message": row["error"], "param": prompt, "code": code}

    def _unfinished_rows(self) -> Iterator[dict[str, Any]]:
        """The rows that no part has; with an error only if it was known before anything ran."""
        for shard in self.ledger.shards(self.job.id):
            if shard.retry_of is None:
                yield from self._unfinished_rows_of(shard)

    def _unfinished_rows_of(self, shard: ShardRecord) -> Iterator[dict[str, Any]]:
        parts = self.ledger.retried_parts(self.job.id, shard.number)
        done = {row for part in parts for row in self._row_numbers(part)}
        if len(done) == shard.num_rows:
            return
        spooled = read_shard(Path(shard.spool_path))
        names = [name for name in ("row", "custom_id", "plan_error", REQUEST_ERROR) if name in spooled.column_names]
        for row in spooled.select(names).to_pylist():
            if row["row"] not in done:
                self.on_row()
                yield {**row, "error": row["plan_error"]}

    def _row_numbers(self, part: PartRecord) -> Sequence[int]:
        try:
            numbers: list[int] = _read_part(open_folder(self.job.output_dir), part.file_name, ())["row"].to_pylist()
        except PartMissing:
            return []
        return numbers

    def _write(self, file: IncomingFile, row: Mapping[str, Any], line: Mapping[str, Any]) -> None:
        head = {"id": f"batch_{self._request_id(row)}", "custom_id": row["custom_id"]}
        file.write((json.dumps({**head, **line}, ensure_ascii=False) + "\n").encode())

    def _request_id(self, row: Mapping[str, Any]) -> str:
        return f"req_{self.batch.id.removeprefix('batch_')}-{row['row']}"

    def _keep(self, file: IncomingFile, kind: str) -> NewFile | None:
        if not file.num_bytes:
            return None
        # The same each time: who takes up the work of a process that was killed writes over its file.
        file_id = f"file-{hashlib.sha256(f'{self.batch.id}/{kind}'.encode()).hexdigest()[:24]}"
        file.keep(file_id)
        seconds = self.batch.output_expires_seconds or DEFAULT_EXPIRY_SECONDS
        name = f"{self.batch.id}_{kind}.jsonl"
        return NewFile(file_id, self.batch.tenant, PURPOSE, name, file.num_bytes, file.sha256, seconds)


def _answers(row: Mapping[str, Any]) -> list[Answer]:
    before = row.get(ECHO) or "", row.get("prompt_logprobs")
    is_told = not row.get(OMIT_REASONING)
    reasoning = row.get("reasoning") if is_told else None
    if row.get(ECHOES_ONLY):
        return [Answer.of_prompt(*before) for _ in row["outputs"] or [row["output"]]]
    # Workers of an earlier version write none.
    stopped = [None if reason is None else json.loads(reason) for reason in row.get("stop_reasons") or ()]
    if row["outputs"] is None:
        answer = Answer(row["output"], row["finish_reason"], row["logprobs"], *before, reasoning)
        return [replace(answer, stop_reason=reason) for reason in stopped or [None]]
    logprobs = row["outputs_logprobs"] or [None] * len(row["outputs"])
    columns = (row["outputs"], row["finish_reasons"], logprobs)
    answers = [Answer(*answer, *before) for answer in zip(*columns, strict=True)]
    # Of several answers workers of an earlier version write the first one's.
    thought = (row.get("outputs_reasoning") if is_told else None) or [reasoning] + [None] * (len(answers) - 1)
    told = zip(answers, stopped or [None] * len(answers), thought, strict=True)
    return [replace(answer, stop_reason=reason, reasoning=thinking) for answer, reason, thinking in told]


def _with_calls(answer: Answer, form: CallFormat, key: str) -> Answer:
    """The answer whose text has calls of tools, parted from it."""
    event = form.parser(key).add(StreamEvent(1, text=answer.text, finish_reason=answer.finish_reason))
    return replace(answer, text=event.text, finish_reason=str(event.finish_reason), tool_calls=merged_calls([event]))


def _response(status_code: int, request_id: str, body: dict[str, Any]) -> dict[str, Any]:
    return {"status_code": status_code, "request_id": request_id, "body": body}


def _read_part(folder: OutputFolder, file_name: str, without: Sequence[str]) -> pa.Table:
    """Raises PartMissing, StorageError."""
    try:
        with folder.open_part(file_name) as file:
            return file.read([name for name in file.schema_arrow.names if name not in without])
    except PartMissing as error:
        if not folder.exists():
            # With all of it: a disk that is not there now, rather than somebody's hand.
            raise StorageError(f"folder {folder} is not there") from error
        raise PartMissing(f"{error}, and with it answers of a batch") from error
    except (OSError, pa.ArrowException) as error:
        raise StorageError(f"part {folder}/{file_name} cannot be read: {error}") from error
