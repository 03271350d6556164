"""Trying again what a ledger, a sink or a folder refuses for now, until an attempt is told to stop."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from ...storage.errors import LedgerError, LedgerUnavailable, SinkUnavailable, StorageError, StoreUnavailable
from ...storage.ledger.ledger import Ledger
from ...storage.ledger.records import Claim
from ..rare_warnings import RareWarnings

logger = logging.getLogger(__name__)

T = TypeVar("T")
_RETRY_SECONDS = 0.5
_LONGEST_RETRY_SECONDS = 8.0


@dataclass
class Trouble:
    """What an attempt waits for, noted in the ledger: who follows its job is told at once.

    Where the ledger takes no note, it does without: nothing depends on it.
    """

    ledger: Ledger
    claim: Claim
    _is_noted: bool = field(default=False, init=False)

    def note(self, error: StorageError) -> None:
        """It waits, and why."""
        if not self._is_noted:
            self._tell(str(error))

    def clear(self) -> None:
        """It goes on."""
        if self._is_noted:
            self._tell(None)

    def _tell(self, reason: str | None) -> None:
        with suppress(LedgerError):
            self.ledger.leases.note_trouble(self.claim, reason)
            self._is_noted = reason is not None


@dataclass(frozen=True)
class Patience:
    """Of one attempt.

    `write_seconds`: how long what cannot be written is kept. `store_seconds`: the same where the folder is an object
    store, which is away for other workers too.
    """

    trouble: Trouble
    stop: threading.Event
    write_seconds: float
    store_seconds: float
    _warnings: RareWarnings = field(default_factory=lambda: RareWarnings(logger))

    def with_ledger(self, call: Callable[[], T]) -> T:
        """Try again while the database is away: finished rows are kept meanwhile."""
        while True:
            try:
                result = call()
            except LedgerUnavailable as error:
                if isinstance(error, SinkUnavailable):
                    self.trouble.note(error)
                if self.stop.wait(_RETRY_SECONDS):
                    raise
                what = "sink" if isinstance(error, SinkUnavailable) else "ledger"
                self._warnings.warn(f"the {what} does not answer, trying again: {error}")
            else:
                self.trouble.clear()
                return result

    def with_folder(self, write: Callable[[], None]) -> None:
        """Try again while there is no room: rows that were given back at once would be generated in vain, again."""
        began = time.monotonic()
        pauses = _pauses()
        while True:
            try:
                write()
            except StorageError as error:
                self.trouble.note(error)
                patience = self.store_seconds if isinstance(error, StoreUnavailable) else self.write_seconds
                if time.monotonic() - began >= patience or self.stop.wait(next(pauses)):
                    raise
                self._warnings.warn(f"a part cannot be written, trying again: {error}")
            else:
                return self.trouble.clear()


def _pauses() -> Iterator[float]:
    seconds = _RETRY_SECONDS
    while True:
        yield seconds
        seconds = min(2 * seconds, _LONGEST_RETRY_SECONDS)
