"""What `verify` refuses to go by, and why."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.jobs.errors import NotVerifiable
from headrace.jobs.spec.schemas import JobSpec
from headrace.jobs.verification.receipts import Receipt
from headrace.storage.errors import UnknownBatch, UnknownJob
from headrace.storage.ledger.batch_records import NewBatch
from headrace.storage.ledger.ledger import Ledger
from headrace.storage.output.local_folder import LocalFolder
from headrace.storage.output.manifest import Manifest, complete_manifest, write_manifest


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    ledger = Ledger(f"sqlite:///{tmp_path / 'headrace.db'}")
    ledger.migrate()
    yield ledger
    ledger.close()


def test_a_batch_that_nobody_knows_or_that_has_no_rows(ledger: Ledger) -> None:
    with pytest.raises(
        UnknownBatch, match=r"ledger sqlite:.*headrace\.db has no batch 'batch_07': name an output folder"
    ):
        Receipt.find(ledger, "batch_07")
    ledger.batches.add(NewBatch("batch_08", "default", "/v1/completions", "file-1", "24h", 60.0))
    with pytest.raises(NotVerifiable, match="batch_08 has no rows"):
        Receipt.find(ledger, "batch_08")


def test_another_ledgers_batch_is_not_made_again(ledger: Ledger, tmp_path: Path) -> None:
    """Its input file is not here."""
    folder, manifest = LocalFolder(tmp_path), Manifest("job_07", "f")
    options = JobSpec.parse(model="m", endpoint="/v1/completions", sampling={}).model_dump(mode="json")
    write_manifest(folder, manifest)
    complete_manifest(folder, manifest, lambda: {"options": options})
    with pytest.raises(NotVerifiable, match=r"job_07 .* is not in this ledger, and is a batch's, whose input file"):
        Receipt.find(ledger, str(tmp_path))


def test_a_job_that_nobody_knows_is_none_of_ours(ledger: Ledger, tmp_path: Path) -> None:
    with pytest.raises(UnknownJob) as unknown:
        Receipt.find(ledger, "nowhere")
    looked_up = (
        f"{Path.cwd() / 'nowhere'} is no folder, and ledger sqlite:///{tmp_path}/headrace.db has no job 'nowhere': "
    )
    assert str(unknown.value).startswith(looked_up)
