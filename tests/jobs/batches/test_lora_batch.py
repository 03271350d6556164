"""A batch whose lines name a LoRA adapter is a job of its base model that is answered with it."""

import pytest

from headrace.jobs.api.models import ServedModels
from headrace.jobs.batches.files import FileStore
from headrace.jobs.batches.validation import InvalidBatch, Validation
from headrace.jobs.broker.celery_app import shard_queue
from headrace.jobs.spec.lora import parse_loras
from headrace.jobs.spec.precision import Precision

from ...engine.lora.adapters import save_adapter
from ..running import MODEL
from .conftest import add_batch


@pytest.fixture
def validation(client, tmp_path):
    folder = save_adapter(MODEL, tmp_path / "kind")
    models = ServedModels.of([str(MODEL)], lora_modules=parse_loras([f"kind={folder}"]))
    return Validation(client, models, FileStore(tmp_path / "files", client.ledger.files, 10_000_000))


def test_its_job(validation, tmp_path):
    job = validation.run(add_batch(validation, 2, model="kind"), lambda: None)
    assert job.spec["lora"] == {"name": "kind", "path": str(tmp_path / "kind")}
    assert (job.model, job.queue) == (str(MODEL), shard_queue(str(MODEL), Precision()))
    assert validation.models.name_of(job) == "kind"


def test_other_models(validation):
    job = validation.run(add_batch(validation, 2), lambda: None)
    assert "lora" not in job.spec
    with pytest.raises(InvalidBatch, match="rude"):
        validation.run(add_batch(validation, 2, model="rude"), lambda: None)
