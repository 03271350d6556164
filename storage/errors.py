"""Errors of the storage layer. Each message is one line that names what is wrong and what to do about it."""


class StorageError(Exception):
    """Anything that reading input, keeping the ledger or writing output can report to a caller."""


class InputError(StorageError):
    """The input as a whole cannot be used; a single bad row is an error row instead."""


class OutputNotEmpty(StorageError):
    """The output folder holds something that the chosen mode must not touch."""


class ManifestDamaged(StorageError):
    """The output folder's manifest does not say which job it belongs to; only overwriting helps."""


class PartMissing(StorageError):
    """A part the ledger knows is neither under its temporary nor under its final name."""


class PartDamaged(StorageError):
    """A part is there and cannot be read."""


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
