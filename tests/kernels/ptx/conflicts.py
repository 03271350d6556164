"""Who of a launch touches the same memory with nothing between that orders it: on a GPU nobody knows who comes first.

Programs (CTAs) are ordered by atomics alone, of which one releases and a later one at that place acquires; parts of a
program (warps) also by its barriers. What two write is refused even where it is the same number: it need not be for
other inputs. An agent is a part of a program between two barriers, as a number; zero is nobody.
"""

import mmap

import numpy as np

from .values import Array

_MANY_PROGRAMS = -1
_WARPS_TOGETHER = 4
# From so many on, memory is not promised before it is touched.
_LARGE_BYTES = 2**28
# Linux's; of Python's `mmap` it is from 3.13 on.
_NORESERVE = 0x4000
# Reads of what nobody writes are kept for later, so many arrays of them.
_MAX_PENDING = 4096


class ConflictError(RuntimeError):
    """Two have touched a place, one of them has written to it, and nobody knows in which order."""


class Order:
    """What comes before what (PTX ISA, 8.9). num_warps: of each program, which are its parts.

    What four of them do together is done by one more: after it each of them may go on, but not it after one of them.
    """

    def __init__(self, num_programs: int, num_warps: int = 1) -> None:
        self._num_programs, self._num_warps = num_programs, num_warps
        self._several = num_warps + -(-num_warps // _WARPS_TOGETHER)
        self._epochs = np.ones(num_programs, np.int64)
        # Of each program, up to which epoch it knows what others did; and what one learns at an address.
        self._heard: dict[int, dict[int, int]] = {}
        self._told: dict[int, dict[int, int]] = {}

    def agents(self, programs: Array | int, warps: Array | int = 0) -> Array:
        return self._agents(self._epochs[programs], programs, warps)

    def group_agents(self, programs: Array | int, groups: Array | int) -> Array:
        """Of warps together."""
        return self._agents(self._epochs[programs], programs, self._num_warps + groups)

    def barrier(self, programs: Array | int) -> None:
        """What these programs did is done for all of their parts."""
        self._epochs[programs] += 1

    def update(self, program: int, address: int, acquires: bool, releases: bool) -> None:
        """An atomic."""
        if acquires:
            _learn(self._heard.setdefault(program, {}), self._told.get(address, {}))
        if releases:
            self.barrier(program)
            told = self._told.setdefault(address, {})
            _learn(told, self._heard.get(program, {}) | {program: int(self._epochs[program])})

    def are_before(self, agents: Array, later: Array) -> Array:
        """Whether what the first did is done for the others; nobody is before all."""
        (epochs, programs, parts), (later_epochs, later_programs, later_parts) = self._split(agents), self._split(later)
        are_together = (parts - self._num_warps == later_parts // _WARPS_TOGETHER) & (later_parts < self._num_warps)
        are = (programs == later_programs) & ((epochs < later_epochs) | (parts == later_parts) | are_together)
        if self._heard:
            pairs = zip(later_programs.tolist(), programs.tolist(), strict=True)
            are |= epochs < [self._heard.get(program, {}).get(other, 0) for program, other in pairs]
        return ((agents != _MANY_PROGRAMS) & are) | (agents == 0)

    def joined(self, agents: Array, others: Array) -> Array:
        """One agent for both where the first is not before the other."""
        (epochs, programs, _), (_, other_programs, _) = self._split(agents), self._split(others)
        are_of_one = (programs == other_programs) & (agents != _MANY_PROGRAMS) & (others != _MANY_PROGRAMS)
        several = np.where(are_of_one, self._agents(epochs, programs, self._several), _MANY_PROGRAMS)
        return np.where(self.are_before(agents, others), others, several)

    def said(self, agent: int) -> str:
        if agent == _MANY_PROGRAMS:
            return "several programs"
        _, program, part = (int(each) for each in self._split(np.array(agent)))
        if self._num_warps == 1:
            return f"program {program}"
        return f"warp {part} of program {program}" if part < self._num_warps else f"warps of program {program}"

    def _agents(self, epochs: Array, programs: Array | int, parts: Array | int) -> Array:
        return (epochs * self._num_programs + programs) * (self._several + 1) + parts

    def _split(self, agents: Array) -> tuple[Array, Array, Array]:
        programs, parts = np.divmod(agents, self._several + 1)
        epochs, programs = np.divmod(programs, self._num_programs)
        return epochs, programs, parts


def _learn(known: dict[int, int], told: dict[int, int]) -> None:
    for program, epoch in told.items():
        known[program] = max(epoch, known.get(program, 0))


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
