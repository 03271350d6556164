"""Sequences that wait, in the order in which they are to be served."""

import heapq
from collections.abc import Iterator

from .sequence import Sequence

Turn = tuple[int, int, int]


class WaitingQueue:
    """A heap by `Sequence.turn`: lower priority values first, then earlier arrivals."""

    def __init__(self) -> None:
        self._heap: list[Turn] = []
        # Those removed from the middle are gone from here at once, and from the heap when they come to its top.
        self._sequences: dict[Turn, Sequence] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences.values())

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.turn in self._sequences

    @property
    def first(self) -> Sequence:
        while (sequence := self._sequences.get(self._heap[0])) is None:
            heapq.heappop(self._heap)
        return sequence

    @property
    def second(self) -> Sequence | None:
        """The one after the first, if there is one."""
        if len(self._sequences) < 2:
            return None
        turn = self.first.turn
        heapq.heappop(self._heap)
        second = self.first
        heapq.heappush(self._heap, turn)
        return second

    def push(self, sequence: Sequence) -> None:
        turn = sequence.turn
        self._sequences[turn] = sequence
        heapq.heappush(self._heap, turn)

    def remove(self, sequence: Sequence) -> None:
        del self._sequences[sequence.turn]
        if not self._sequences:
            self._heap.clear()
