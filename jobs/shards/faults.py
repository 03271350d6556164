"""Faults of our own, which end an attempt that is made again, but not for ever, and what rows say of them then."""

from collections.abc import Collection, Iterable
from itertools import takewhile

from redis.exceptions import RedisError

from ...storage.errors import LedgerError, StorageError
from ...storage.ledger.records import AttemptOutcome, AttemptRecord, PartRecord

# What the errors of rows begin with that are not to blame for them.
ENGINE_FAILED = "engine failed: "
WORKER_CRASHED = "worker_crashed: "
_FAULT = "attempt_failed: "
MAX_FAULTS = 5
# Beyond that error rows do not help: the fault is where earlier parts are read, or new ones committed.
HOPELESS_FAULTS = 2 * MAX_FAULTS
# What has a cause outside, which may pass.
_NOT_OURS = (StorageError, LedgerError, RedisError, OSError, MemoryError)


def why_failed(error: Exception) -> str:
    """What is written down of an attempt that an exception has ended; in one line."""
    text = " ".join(str(error).split())
    if isinstance(error, StorageError):
        return text
    return f"{'' if isinstance(error, _NOT_OURS) else _FAULT}{type(error).__name__}: {text}"


def is_servers(row_error: str) -> bool:
    """Whether a row has an error that says nothing against the row."""
    return row_error.startswith((ENGINE_FAILED, WORKER_CRASHED, _FAULT))


def is_fault(error: str | None) -> bool:
    """Whether `why_failed` has taken an attempt's error for a fault of ours."""
    return error is not None and error.startswith(_FAULT)


def repeated_fault(
    attempts: Iterable[AttemptRecord], parts: Iterable[PartRecord], at_least: int = MAX_FAULTS
) -> str | None:
    """The fault with which a shard's last attempts have all ended, without a part, when they were so many."""
    counted = [each for each in attempts if each.outcome not in (None, AttemptOutcome.RELEASED)]
    counted.sort(key=lambda attempt: attempt.number, reverse=True)
    fault = counted[0].error if counted else None
    if fault is None or not is_fault(fault):
        return None
    fruitful = {part.attempt_id for part in parts}
    same = takewhile(lambda attempt: _is_in_vain(attempt, fault, fruitful), counted)
    return fault if sum(1 for _ in same) >= at_least else None


def _is_in_vain(attempt: AttemptRecord, fault: str, fruitful: Collection[int]) -> bool:
    return attempt.error == fault and attempt.id not in fruitful
