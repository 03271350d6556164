"""What a running attempt waits for, noted in the ledger: who follows its job is told at once."""

from contextlib import suppress
from dataclasses import dataclass, field

from ...storage.errors import LedgerError, StorageError
from ...storage.ledger import Ledger
from ...storage.records import Claim


@dataclass
class Trouble:
    """Of one attempt. Where the ledger takes no note, it does without: nothing depends on it."""

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
