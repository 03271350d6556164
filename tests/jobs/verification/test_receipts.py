"""What `verify` refuses to go by, and why."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.jobs.errors import NotVerifiable
from headrace.jobs.verification.receipts import Receipt
from headrace.storage.errors import UnknownJob
from headrace.storage.ledger import Ledger


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    ledger = Ledger(f"sqlite:///{tmp_path / 'headrace.db'}")
    ledger.migrate()
    yield ledger
    ledger.close()


def test_a_batch_is_refused_by_its_own_name(ledger: Ledger) -> None:
    with pytest.raises(NotVerifiable, match=r"batch_07 is a batch's: .* input file"):
        Receipt.find(ledger, "batch_07")


def test_a_job_that_nobody_knows_is_none_of_ours(ledger: Ledger) -> None:
    with pytest.raises(UnknownJob):
        Receipt.find(ledger, "job_07")
