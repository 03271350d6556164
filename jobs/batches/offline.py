"""A file of requests answered by one command, without a server: a batch whose answers become one file.

Asked again after an interruption of any kind, the batch that was begun goes on.
"""

import hashlib
import secrets
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ...engine.paths import absolute_path
from ...storage.errors import UnknownFile, UnknownJob
from ...storage.files import write_lines
from ...storage.ledger.batch_records import BatchRecord, BatchState, NewBatch
from ...storage.ledger.file_records import NewFile
from ...storage.ledger.records import DEFAULT_TENANT
from ...storage.readers import readable
from ...storage.readers.json_lines import BadRow, parse_object
from ...storage.readers.location import Location
from ...storage.rows.external_sort import ExternalSorter
from ..api.models import ServedModel, ServedModels
from ..client.client import Client
from .files import FileStore, new_file_id
from .lines import CHAT, ENDPOINTS, lines_of
from .output import request_number

# A year: how long requests may take, and how long it is kept what they were.
_WINDOW, _WINDOW_SECONDS = "365d", 365 * 86400
_MARK = "run_batch"
_PAGE = 100
_CHUNK_BYTES = 2**20
_SORT_MEMORY_BYTES = 64 * 2**20


@dataclass(frozen=True)
class OfflineBatches:
    """Begins batches for a file of answers each, and writes these files."""

    client: Client
    models: ServedModels
    store: FileStore

    def begin(self, input: Location, output: Path) -> BatchRecord:
        """The batch of these requests for this file: one that was begun and not delivered, else a new one.

        Raises InputError, StorageError, `LedgerError`.
        """
        with self.store.incoming() as incoming:
            with readable(input.name), input.open() as file:
                while chunk := file.read(_CHUNK_BYTES):
                    incoming.write(chunk)
            mark = {_MARK: self._digest(incoming.sha256, output)}
            if (begun := self._begun(mark)) is not None:
                return begun
            new = NewFile(
                id=new_file_id(),
                tenant=DEFAULT_TENANT,
                purpose="batch",
                filename=Path(input.name).name,
                num_bytes=incoming.num_bytes,
                sha256=incoming.sha256,
                expires_after_seconds=_WINDOW_SECONDS,
            )
            stored = self.store.add(incoming, new)
        batch = NewBatch(
            id=f"batch_{secrets.token_hex(12)}",
            tenant=DEFAULT_TENANT,
            endpoint=_endpoint(self.store.path(stored)),
            input_file_id=stored.id,
            served_models=self.models.as_noted(),
            completion_window=_WINDOW,
            within_seconds=_WINDOW_SECONDS,
            metadata=mark,
            output_expires_seconds=_WINDOW_SECONDS,
        )
        return self.client.ledger.batches.add(batch)

    def deliver(self, batch: BatchRecord, output: Path) -> None:
        """Write one line for each request, in the requests' order: its answer, or what is wrong with it.

        The file is there once it is whole. What it was made of is removed then, so that the same requests asked again
        are another batch. Raises StorageError, `LedgerError`.
        """
        answers = [self.store.records.get(batch.tenant, file) for file in _answer_files(batch)]
        with ExternalSorter(self.client.jobs_folder, _SORT_MEMORY_BYTES) as lines:
            for file in answers:
                for _, line in lines_of(self.store.path(file)):
                    lines.add(request_number(line).to_bytes(8), line)
            write_lines(output, (line.decode().rstrip("\n") for _, line in lines))
        for file in answers:
            self.store.delete(batch.tenant, file.id)

    def forget_requests(self, batch: BatchRecord) -> None:
        """Remove the requests of a batch that cannot be asked. Raises `LedgerError`."""
        with suppress(UnknownFile):
            self.store.delete(batch.tenant, batch.input_file_id)

    def _digest(self, sha256: str, output: Path) -> str:
        """What tells one call's batch from all others."""
        asked = [sha256, str(absolute_path(output))]
        asked += [
            f"{served.name}={served.answers_as}|{served.precision}{_sampled(served)}" for served in self.models.all
        ]
        return hashlib.sha256("\n".join(asked).encode()).hexdigest()

    def _begun(self, mark: dict[str, str]) -> BatchRecord | None:
        newest = next((batch for batch in self._batches() if batch.metadata == mark), None)
        if newest is None or not newest.state.has_ended:
            return newest
        return newest if newest.state is BatchState.COMPLETED and self._can_be_delivered(newest) else None

    def _can_be_delivered(self, batch: BatchRecord) -> bool:
        files = _answer_files(batch)
        if self.store.records.known(files) != set(files):
            return False
        try:
            self.client.ledger.job(batch.job_id or "")
        except UnknownJob:
            return False
        return True

    def _batches(self) -> Iterator[BatchRecord]:
        """The newest first."""
        after = None
        while page := self.client.ledger.batches.page(DEFAULT_TENANT, _PAGE, after):
            yield from page
            after = page[-1].id


def _sampled(served: ServedModel) -> str:
    """What else tells two calls apart whose requests do not say how they are sampled."""
    return f"|{sorted(served.sampling_defaults.items())}" if served.sampling_defaults else ""


def _answer_files(batch: BatchRecord) -> list[str]:
    return [file for file in (batch.output_file_id, batch.error_file_id) if file is not None]


def _endpoint(path: Path) -> str:
    """That of the first request; what is wrong with it is said when all lines are checked."""
    for _, text in lines_of(path):
        with suppress(BadRow):
            if (url := parse_object(text).get("url")) in ENDPOINTS:
                return str(url)
        break
    return CHAT
