"""Who of a launch touches the same memory with nothing between that orders it: on a GPU nobody knows who comes first.

What two write is refused even where it is the same number: it need not be for other inputs.
"""

import mmap

import numpy as np

from .order import Order
from .values import Array

# From so many on, memory is not promised before it is touched.
_LARGE_BYTES = 2**28
# Linux's; of Python's `mmap` it is from 3.13 on.
_NORESERVE = 0x4000
# Reads of what nobody writes are kept for later, so many arrays of them.
_MAX_PENDING = 4096


class ConflictError(RuntimeError):
    """Two have touched a place, one of them has written to it, and nobody knows in which order."""


class Accesses:
    """Who has written and read each unit, of `unit` bytes, of some memory. Raises `ConflictError`.

    may_repeat: whether one instruction may write a place by several agents, as it may where they write the same.
    """

    def __init__(self, order: Order, num_bytes: int, unit: int, name: str, may_repeat: bool = False) -> None:
        self._order, self._num_bytes, self._unit, self._name = order, num_bytes, unit, name
        self._may_repeat = may_repeat
        self._writers: Array | None = None
        self._updaters: Array | None = None
        self._readers = np.empty(0, np.int64)
        self._pending: list[tuple[Array, int, Array]] = []

    def read(self, offsets: Array, num_bytes: int, agents: Array) -> None:
        """offsets, in bytes: of whatever shape, at each so many. agents: one for each offset, or for all."""
        if self._writers is None:
            self._pending.append((offsets, num_bytes, agents))
            if len(self._pending) < _MAX_PENDING:
                return
            self._begin()
            return
        places, agents = self._places(offsets, num_bytes, agents)
        self._refuse(self._writers, places, agents, "reads what {} wrote")
        if self._updaters is not None:
            self._refuse(self._updaters, places, agents, "reads what {} updated")
        self._note(self._readers, places, agents)

    def write(self, offsets: Array, num_bytes: int, agents: Array) -> None:
        """As `read`."""
        writers = self._begin()
        places, agents = self._places(offsets, num_bytes, agents)
        self._refuse(writers, places, agents, "writes what {} wrote")
        self._refuse(self._readers, places, agents, "writes what {} read")
        if self._updaters is not None:
            self._refuse(self._updaters, places, agents, "writes what {} updated")
        writers[places] = agents
        if not self._may_repeat:
            self._refuse(writers, places, agents, "writes what {} wrote")

    def update(self, offsets: Array, num_bytes: int, agents: Array) -> None:
        """As `read`, by atomics, which do not disturb one another."""
        writers = self._begin()
        if self._updaters is None:
            self._updaters = _zeros(len(writers))
        places, agents = self._places(offsets, num_bytes, agents)
        self._refuse(writers, places, agents, "updates what {} wrote")
        self._refuse(self._readers, places, agents, "updates what {} read")
        self._note(self._updaters, places, agents)

    def _begin(self) -> Array:
        """Reads alone are no conflict: they are looked at when there is something else."""
        if self._writers is None:
            size = -(-self._num_bytes // self._unit)
            self._writers, self._readers = _zeros(size), _zeros(size)
            for offsets, num_bytes, agents in self._pending:
                self._note(self._readers, *self._places(offsets, num_bytes, agents))
            self._pending.clear()
        return self._writers

    def _places(self, offsets: Array, num_bytes: int, agents: Array) -> tuple[Array, Array]:
        places, agents = offsets // self._unit, np.broadcast_to(agents, offsets.shape)
        if num_bytes <= self._unit:
            return places.ravel(), agents.ravel()
        count = num_bytes // self._unit
        return (places[..., None] + np.arange(count)).ravel(), np.repeat(agents.ravel(), count)

    def _note(self, held: Array, places: Array, agents: Array) -> None:
        """Several agents may be at one place: those that another came after are added to it."""
        while len(places):
            before = held[places]
            is_new = before != agents
            if not is_new.any():
                return
            places, agents = places[is_new], agents[is_new]
            joined = self._order.joined(before[is_new], agents)
            held[places] = joined
            is_lost = (held[places] != joined) & (held[places] != agents)
            places, agents = places[is_lost], joined[is_lost]

    def _refuse(self, held: Array, places: Array, agents: Array, what: str) -> None:
        before = held[places]
        is_other = (before != 0) & (before != agents)
        if not is_other.any():
            return
        before, places, agents = before[is_other], places[is_other], agents[is_other]
        are_wrong = ~self._order.are_before(before, agents)
        if are_wrong.any():
            first = int(np.argmax(are_wrong))
            doing = what.format(self._order.said(int(before[first])))
            raise ConflictError(
                f"{self._order.said(int(agents[first]))} {doing}, with nothing between that orders them, in "
                f"{self._name} at byte {int(places[first]) * self._unit}"
            )


def _zeros(size: int) -> Array:
    return np.zeros(size, np.int64) if 8 * size < _LARGE_BYTES else np.frombuffer(untouched(8 * size), np.int64)


def untouched(num_bytes: int) -> mmap.mmap:
    """Zeros, of which no more is taken from the machine than is touched, however many there are."""
    return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
