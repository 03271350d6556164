"""Batches whose lines nobody has looked at yet, and what validates them."""

import secrets

import pytest

from headrace.jobs.api.models import ServedModels
from headrace.jobs.batches.files import FileStore
from headrace.jobs.batches.validation import Validation
from headrace.jobs.client.client import Client
from headrace.jobs.settings import Settings
from headrace.storage.ledger.batch_records import NewBatch
from headrace.storage.ledger.file_records import NewFile

from ..api.batch_lines import CHAT, chat_line, jsonl
from ..running import MODEL, environment


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    """Over a ledger that no server looks after."""
    data_dir = tmp_path_factory.mktemp("unattended")
    with Client(Settings.from_environment(environment(data_dir))) as client:
        yield client


@pytest.fixture
def validation(client, tmp_path):
    store = FileStore(tmp_path / "files", client.ledger.files, 10_000_000)
    return Validation(client, ServedModels.of([str(MODEL)]), store)


def add_batch(validation, num_lines, within_seconds=3600, tenant=None, served_models=None, **body):
    """A batch of a tenant of its own, unless one is named."""
    name, content = secrets.token_hex(8), jsonl(chat_line(f"row-{number}", **body) for number in range(num_lines))
    tenant = tenant or f"tenant-{name}"
    with validation.store.incoming() as incoming:
        incoming.write(content)
        file = NewFile(f"file-{name}", tenant, "batch", "x", len(content), incoming.sha256, None)
        validation.store.add(incoming, file)
    served = {"served_models": served_models}
    new = NewBatch(f"batch_{name}", tenant, CHAT, file.id, "1h", within_seconds, **served)
    return validation.client.ledger.batches.add(new)
