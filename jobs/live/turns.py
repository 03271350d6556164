"""Which claimed requests the engine has, and which wait until it has room and it is their tenant's turn."""

import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

from .fairness import FairQueue
from .requests import LiveRequest

T = TypeVar("T", bound=Hashable)


class Turns(Generic[T]):
    """Lets in as many samples as the engine runs at a time. Thread-safe.

    The engine takes equal priorities by arrival, so what is handed to it can not be overtaken any more. A request of
    which some samples have a slot has one for all. `start` is called with each item whose turn has come, without the
    lock, and perhaps in the thread of another item's `leave`.
    """

    def __init__(self, num_slots: int, start: Callable[[T], None]) -> None:
        self._num_slots = num_slots
        self._start = start
        self._waiting: FairQueue[T] = FairQueue()
        # How many samples each has, of all that have come and not left.
        self._num_samples: dict[T, int] = {}
        self._num_inside = 0
        self._lock = threading.Lock()

    def enter(self, item: T, request: LiveRequest) -> None:
        """Have `start` called with the item, now or later."""
        with self._lock:
            self._num_samples[item] = request.sampling.n
            self._waiting.add(item, request.tenant, request.most_tokens, request.weight)
        self._let_in()

    def leave(self, item: T) -> None:
        """Make room: the item has ended, or is not to be started. May be repeated."""
        with self._lock:
            num_samples = self._num_samples.pop(item, 0)
            if not self._waiting.remove(item):
                self._num_inside -= num_samples
        self._let_in()

    def _let_in(self) -> None:
        with self._lock:
            items = list(self._next_items())
        for item in items:
            self._start(item)

    def _next_items(self) -> Iterator[T]:
        while self._waiting and self._num_inside < self._num_slots:
            item = self._waiting.pop()
            self._num_inside += self._num_samples[item]
            yield item
