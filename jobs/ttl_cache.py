"""What the ledger says, remembered for a few seconds."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from ..storage.errors import LedgerUnavailable

K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True)
class Entry(Generic[V]):
    """A value and when it was read, by the monotonic clock."""

    value: V
    read_at: float


class TtlCache(Generic[K, V]):
    """At most `max_entries` values, each true to `seconds`; the least recently used go first. Thread-safe.

    While the ledger does not answer, a value is used for up to `stale_seconds`.
    """

    def __init__(self, seconds: float, stale_seconds: float = 0.0, max_entries: int = 4096) -> None:
        self._seconds = seconds
        self._stale_seconds = stale_seconds
        self._max_entries = max_entries
        self._entries: OrderedDict[K, Entry[V]] = OrderedDict()
        self._lock = threading.Lock()

    def fresh(self, key: K) -> Entry[V] | None:
        """What is known without asking."""
        return self._younger_than(self._seconds, key)

    def get(self, key: K, load: Callable[[], V]) -> V:
        """The value, by `load` when it is not fresh. Raises what `load` raises."""
        if (entry := self.fresh(key)) is not None:
            return entry.value
        try:
            value = load()
        except LedgerUnavailable:
            if (entry := self._younger_than(self._stale_seconds, key)) is None:
                raise
            return entry.value
        self._put(key, value)
        return value

    def _younger_than(self, seconds: float, key: K) -> Entry[V] | None:
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or time.monotonic() - entry.read_at > seconds:
                return None
            self._entries.move_to_end(key)
            return entry

    def _put(self, key: K, value: V) -> None:
        with self._lock:
            self._entries[key] = Entry(value, time.monotonic())
            self._entries.move_to_end(key)
            while len(self._entries) > self._max_entries:
                self._entries.popitem(last=False)
