"""What is tried again until it is taken, and what is said of it meanwhile."""

import threading
from typing import cast

import pytest

from headrace.jobs.shards import patience as patience_module
from headrace.jobs.shards.patience import Patience, Trouble
from headrace.storage.errors import LedgerUnavailable, SinkUnavailable


class NotedTrouble:
    """In the place of what tells a job's followers."""

    def __init__(self) -> None:
        self.last: Exception | None = None

    def note(self, error: Exception) -> None:
        self.last = error

    def clear(self) -> None:
        self.last = None


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (LedgerUnavailable("locked"), "the ledger does not answer, trying again: locked"),
        (SinkUnavailable("sink x: full"), "the sink does not answer, trying again: sink x: full"),
    ],
    ids=["ledger", "sink"],
)
def test_a_database_that_is_away_for_long_is_named_once(error, said, monkeypatch, caplog):
    """A night of it would fill the disk of the worker's log."""
    monkeypatch.setattr(patience_module, "_RETRY_SECONDS", 0.0)
    problems, trouble = [error] * 100, NotedTrouble()

    def call() -> str:
        if problems:
            raise problems.pop()
        return "done"

    assert Patience(cast(Trouble, trouble), threading.Event(), 1.0, 1.0).with_ledger(call) == "done"
    assert [record.getMessage() for record in caplog.records] == [said]
    assert trouble.last is None
