"""Errors of the storage layer. Each message is one line that names what is wrong and what to do about it."""

import json
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Argument:
    """What a caller passes, as an error names it: here in Python's words, as an option on the command line."""

    name: str
    value: str | None = None

    def __str__(self) -> str:
        return self.name if self.value is None else f"{self.name}={json.dumps(self.value, ensure_ascii=False)}"


class WordedError(Exception):
    """An error whose words may have arguments among them, which each face writes in its own way."""

    def __init__(self, *words: str | Argument) -> None:
        # Else the last one was meant for something else.
        assert len(words) < 2 or any(isinstance(word, Argument) for word in words), words
        super().__init__(*words)

    def worded(self, argument: Callable[[Argument], str]) -> str:
        return "".join(argument(word) if isinstance(word, Argument) else str(word) for word in self.args)

    def __str__(self) -> str:
        return self.worded(str)


class StorageError(WordedError):
    """Anything that reading input, keeping the ledger or writing output can report to a caller."""


class InputError(StorageError):
    """The input as a whole cannot be used; a single bad row is an error row instead."""


class OutputNotEmpty(StorageError):
    """The output folder holds something that the chosen mode must not touch."""


class StoreUnavailable(StorageError):
    """An object store did not do what it was asked: the same call may work when tried again."""


class OutputLost(StorageError):
    """The output folder of a job that writes there is gone, or what was in it; it may come back."""


class ManifestDamaged(StorageError):
    """The output folder's manifest does not say which job it belongs to; only overwriting helps."""


class PartMissing(StorageError):
    """A part the ledger knows is neither under its temporary nor under its final name."""


class PartDamaged(StorageError):
    """A part is there and cannot be read."""


class SpoolDamaged(StorageError):
    """A spooled shard is gone, damaged, or cannot be read now, as its message says."""


class LedgerError(StorageError):
    """The ledger refused a statement or cannot be used as it is."""


class LedgerUnavailable(LedgerError):
    """The database did not answer or is busy, locked or full: the same call may work when tried again."""


class SinkError(StorageError):
    """The table that a job's rows go to cannot be used as it is."""


class SinkUnavailable(LedgerUnavailable, SinkError):
    """The sink's database did not answer or is busy, locked or full: the same call may work when tried again."""


class LeaseLost(LedgerError):
    """The attempt no longer owns its shard, so nothing of the call was recorded."""


class JobEnded(LedgerError):
    """The job has ended, so there is nothing left to stop, pause or go on with."""


class UnknownJob(LedgerError):
    """No job has that id."""


class UnknownFile(LedgerError):
    """The tenant has no file of that id."""


class UnknownBatch(LedgerError):
    """The tenant has no batch of that id."""
