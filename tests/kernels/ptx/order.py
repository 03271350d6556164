"""What comes before what (PTX ISA, 8.9).

Programs (CTAs) are ordered by atomics alone, of which one releases and a later one at that place acquires; parts of a
program (warps) also by its barriers. An agent is a part of a program between two barriers, as a number; zero is nobody.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from .clocks import WARPS_TOGETHER, Clocks
from .values import Array

_MANY_PROGRAMS = -1


class Order:
    """num_warps: of each program, which are its parts.

    What four of them do together is done by one more: after it each of them may go on, but not it after one of them.
    Only where not all warps of a program wait together are they looked at one by one, by `Clocks`.
    """

    def __init__(self, num_programs: int, num_warps: int = 1) -> None:
        self._num_programs, self._num_warps = num_programs, num_warps
        self._num_groups = -(-num_warps // WARPS_TOGETHER)
        self._several = num_warps + self._num_groups
        self._num_parts = self._several + 1 + num_warps
        self._epochs = np.ones((num_programs, num_warps), np.int64)
        self._clocks: dict[int, Clocks] = {}
        # Agents of a program that has clocks, of whom none is before another: as numbers below `_MANY_PROGRAMS`.
        self._sets: list[tuple[int, ...]] = []
        # Of each program, up to which epoch it knows what others did; and what one learns at an address.
        self._heard: dict[int, dict[int, int]] = {}
        self._told: dict[int, dict[int, int]] = {}

    def agents(self, programs: Array | int, warps: Array | int = 0) -> Any:
        return self._agents(self._epochs[programs, warps], programs, warps)

    def group_agent(self, program: int, group: int) -> int:
        """Of warps together."""
        epoch = self._clocks[program].products(group) if program in self._clocks else self._epochs[program, 0]
        return int(self._agents(epoch, program, self._num_warps + group))

    def copies_agent(self, program: int, warp: int) -> tuple[int, Array]:
        """Of what a warp has copied beside what it does, up to now, and what who `acquire`s learns by it alone."""
        moment, told = self._clocks_of(program).copies(warp)
        return int(self._agents(moment, program, self._several + 1 + warp)), told

    def barrier(self, programs: Array | int) -> None:
        """What these programs did is done for all of their parts."""
        chosen = np.atleast_1d(programs)
        if self._clocks:
            for program in self._clocks.keys() & set(chosen.tolist()):
                self._clocks[program].barrier()
            chosen = chosen[[program not in self._clocks for program in chosen.tolist()]]
        self._epochs[chosen] += 1

    def release(self, program: int, warp: int) -> Array:
        """What one learns of a warp that says that it has come so far."""
        return self._clocks_of(program).release(warp)

    def acquire(self, program: int, warp: int, told: Array) -> None:
        self._clocks_of(program).acquire(warp, told)

    def update(self, program: int, address: int, acquires: bool, releases: bool) -> None:
        """An atomic."""
        if acquires:
            _learn(self._heard.setdefault(program, {}), self._told.get(address, {}))
        if releases:
            told = self._told.setdefault(address, {})
            _learn(told, self._heard.get(program, {}) | {program: self._step(program)})

    def are_before(self, agents: Array, later: Array) -> Array:
        """Whether what the first did is done for the others; nobody is before all."""
        if self._clocks:
            return _by_pairs(self._is_before, agents, later).astype(bool)
        (epochs, programs, parts), (later_epochs, later_programs, later_parts) = self._split(agents), self._split(later)
        are_together = (parts - self._num_warps == later_parts // WARPS_TOGETHER) & (later_parts < self._num_warps)
        are = (programs == later_programs) & ((epochs < later_epochs) | (parts == later_parts) | are_together)
        if self._heard:
            pairs = zip(later_programs.tolist(), programs.tolist(), strict=True)
            are |= epochs < [self._heard.get(program, {}).get(other, 0) for program, other in pairs]
        return ((agents != _MANY_PROGRAMS) & are) | (agents == 0)

    def joined(self, agents: Array, others: Array) -> Array:
        """One agent for both where the first is not before the other."""
        if self._clocks:
            return _by_pairs(self._set_of_both, agents, others)
        (epochs, programs, _), (_, other_programs, _) = self._split(agents), self._split(others)
        are_of_one = (programs == other_programs) & (agents != _MANY_PROGRAMS) & (others != _MANY_PROGRAMS)
        several = np.where(are_of_one, self._agents(epochs, programs, self._several), _MANY_PROGRAMS)
        return np.where(self.are_before(agents, others), others, several)

    def said(self, agent: int) -> str:
        if agent == _MANY_PROGRAMS:
            return "several programs"
        if agent < _MANY_PROGRAMS:
            return " and ".join(dict.fromkeys(map(self.said, self._members(agent))))
        _, program, part = self._split(agent)
        if self._num_warps == 1:
            return f"program {program}"
        if part > self._several:
            return f"a copy by warp {part - self._several - 1} of program {program}"
        return f"warp {part} of program {program}" if part < self._num_warps else f"warps of program {program}"

    def _clocks_of(self, program: int) -> Clocks:
        if program not in self._clocks:
            self._clocks[program] = Clocks(self._epochs[program])
        return self._clocks[program]

    def _step(self, program: int) -> int:
        """What it did is done for all of its parts that go on together; gives the epoch before which that was."""
        if program in self._clocks:
            return self._clocks[program].step()
        self.barrier(program)
        return int(self._epochs[program, 0])

    def _is_before(self, agent: int, later: int) -> bool:
        """As `are_before`, where there are clocks."""
        if agent <= 0:
            are_all = (self._is_before(each, later) for each in self._members(agent))
            return agent == 0 or (agent != _MANY_PROGRAMS and all(are_all))
        (epoch, program, part), (later_epoch, later_program, later_part) = self._split(agent), self._split(later)
        if epoch < self._heard.get(later_program, {}).get(program, 0):
            return True
        if program != later_program or program not in self._clocks:
            return program == later_program and (epoch < later_epoch or self._is_own(part, later_part))
        return self._is_own(part, later_part) or self._is_known(epoch, part, self._clocks[program], later_epoch)

    def _is_known(self, moment: int, part: int, clocks: Clocks, later: int) -> bool:
        if part > self._several:
            return clocks.are_copies_known(moment, part - self._several - 1, later)
        if part == self._several:
            return clocks.is_known(moment, range(self._num_warps), later)
        warps = range(part, part + 1) if part < self._num_warps else clocks.warps_of(part - self._num_warps)
        return clocks.is_known(moment, warps, later)

    def _is_own(self, part: int, later_part: int) -> bool:
        """Whether the one does nothing without the other: a warp, and what it did with others, or copied."""
        return part == later_part or (
            later_part < self._num_warps
            and part in (self._num_warps + later_part // WARPS_TOGETHER, self._several + 1 + later_part)
        )

    def _set_of_both(self, agent: int, other: int) -> int:
        """As `joined`; of what several have added to a place, the last is not known to be after the others."""
        kept, others = list(self._members(agent)), self._members(other)
        if len(others) == 1:
            kept = [each for each in kept if not self._is_before(each, other)]
        members = tuple(sorted({*kept, *others}))
        programs = {self._split(each)[1] for each in members}
        if _MANY_PROGRAMS in members or len(programs) > 1:
            return _MANY_PROGRAMS
        if len(members) == 1:
            return members[0]
        if members not in self._sets:
            self._sets.append(members)
        return _MANY_PROGRAMS - 1 - self._sets.index(members)

    def _members(self, agent: int) -> tuple[int, ...]:
        return self._sets[_MANY_PROGRAMS - 1 - agent] if agent < _MANY_PROGRAMS else (agent,)

    def _agents(self, epochs: Array | int, programs: Array | int, parts: Array | int) -> Any:
        return (epochs * self._num_programs + programs) * self._num_parts + parts

    def _split(self, agents: Any) -> tuple[Any, Any, Any]:
        programs, parts = divmod(agents, self._num_parts)
        epochs, programs = divmod(programs, self._num_programs)
        return epochs, programs, parts


def _learn(known: dict[int, int], told: dict[int, int]) -> None:
    for program, epoch in told.items():
        known[program] = max(epoch, known.get(program, 0))


def _by_pairs(function: Callable[[int, int], int], ones: Array, others: Array) -> Array:
    """What the function gives of each pair: few of them are different, and the same often lie beside each other."""
    does_begin = np.ones(len(ones), bool)
    does_begin[1:] = (ones[1:] != ones[:-1]) | (others[1:] != others[:-1])
    begins = np.flatnonzero(does_begin)
    result, left = np.zeros(len(begins), np.int64), np.arange(len(begins))
    ones, others = ones[begins], others[begins]
    while len(left):
        one, other = ones[left[0]], others[left[0]]
        is_same = (ones[left] == one) & (others[left] == other)
        result[left[is_same]] = function(int(one), int(other))
        left = left[~is_same]
    return result[np.cumsum(does_begin) - 1]
