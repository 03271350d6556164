"""Requests of a batch, as they were asked: from its input file, as only there each says how it is sampled."""

from collections.abc import Collection

from ...storage.errors import UnknownFile
from ...storage.ledger.batch_records import BatchRecord
from ..batches.files import FileStore
from ..batches.requests import BatchInput, RequestReader
from ..client.client import Client
from ..errors import NotVerifiable
from ..spec.schemas import JobSpec


def asked_lines(client: Client, batch: BatchRecord, spec: JobSpec, rows: Collection[int]) -> BatchInput:
    """The requests of these rows, whose seeds are those they had. Raises `NotVerifiable` when the file is gone."""
    store = FileStore.of(client.settings, client.ledger)
    try:
        file = store.records.get(batch.tenant, batch.input_file_id)
    except UnknownFile as error:
        raise NotVerifiable(
            f"batch {batch.id} cannot be made again: its input file {batch.input_file_id}, which says how its rows "
            "were asked, was deleted or has expired"
        ) from error
    return BatchInput(store.path(file), file.sha256, RequestReader.of(batch.endpoint, spec), _go_on, frozenset(rows))


def _go_on() -> None:
    pass
