"""A launch: its CTAs some at a time, their threads in lock step, those that are apart by turns."""

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from .instructions import find, settle
from .memory import GlobalMemory
from .order import Order
from .program import Instruction, Place, Program
from .threads import WARP, DivergenceError, Threads
from .values import Array

# Enough that numpy's calls cost little beside what they do.
_THREADS_AT_ONCE = 2048
_NEVER = np.iinfo(np.int64).max


class DeadlockError(DivergenceError):
    """Threads wait for what nobody will do."""


class Flow:
    """Which instruction is next, and for which threads: those that are the least far, so that all meet again."""

    def __init__(self, program: Program, threads: Threads) -> None:
        self._program, self._threads = program, threads
        # Which threads are to do each instruction, None for all; and at which others wait until they are woken.
        self._fronts: dict[int, Array | None] = {0: None}
        self._waiting: dict[int, Array] = {}
        self._position = 0

    def next(self) -> int:
        """Go on by one instruction; the threads that act are those that came to it. `_NEVER` when all have returned."""
        if not self._fronts:
            settle(self._threads)
            self._wake()
        if not self._fronts:
            if self._waiting:
                raise DeadlockError("; ".join(self._said(*each) for each in self._waiting.items()))
            return _NEVER
        self._position = min(self._fronts)
        self._threads.active = self._fronts.pop(self._position)
        self._join(self._position + 1, self._threads.active)
        return self._position

    def branch(self, target: int) -> None:
        """Threads that act go on there."""
        self._leave()
        self._join(target, self._threads.active)

    def branch_by(self, indices: Array, targets: Sequence[int]) -> None:
        """Each of them at the target it has the index of."""
        active = self._threads.active
        acting = np.ones(len(indices), bool) if active is None else active
        for index in np.unique(indices[acting]):
            self._threads.active = acting & (indices == index)
            self.branch(targets[index])

    def end(self) -> None:
        """Threads that act have returned."""
        active = self._threads.active
        self._threads.ended |= True if active is None else active
        self._leave()

    def wait(self) -> None:
        """Those that could not do the present instruction do it again once they are woken, by others' present one."""
        threads = self._threads
        if threads.parked is not None:
            threads.active, threads.parked = threads.parked, None
            self._leave()
            held = self._waiting.get(self._position)
            self._waiting[self._position] = threads.active if held is None else held | threads.active
        self._wake()

    def _wake(self) -> None:
        woken, self._threads.woken = self._threads.woken, None
        if woken is None:
            return
        for position, held in list(self._waiting.items()):
            if (held & woken).any():
                self._join(position, held & woken)
                self._waiting[position] = held & ~woken
                if not self._waiting[position].any():
                    del self._waiting[position]

    def _join(self, position: int, threads: Array | None) -> None:
        if threads is not None and position in self._fronts:
            held = self._fronts[position]
            threads = None if held is None else held | threads
        is_all = threads is None or threads.all()
        if is_all or threads.any():
            self._fronts[position] = None if is_all else threads

    def _leave(self) -> None:
        """Threads that act do not go on at the next instruction."""
        held, active = self._fronts.pop(self._position + 1), self._threads.active
        if active is None:
            return
        staying = ~active if held is None else held & ~active
        if staying.any():
            self._fronts[self._position + 1] = staying

    def _said(self, position: int, waiting: Array) -> str:
        """Who waits, and where."""
        threads, instruction = self._threads, self._program.instructions[position]
        where = ""
        for operand in instruction.operands:
            if isinstance(operand, Place):
                bytes_ = np.unique(threads.addresses(operand, "shared")[waiting]).tolist()
                where = f" at byte {', '.join(map(str, bytes_))} of shared memory"
        who = sorted({threads.part(thread // WARP) for thread in np.flatnonzero(waiting).tolist()})
        warps = "; ".join(
            f"warps {', '.join(str(warp) for _, warp in parts)} of program {program}"
            for program, parts in itertools.groupby(who, lambda part: part[0])
        )
        return f"{warps} wait in vain for {instruction.text}{where}"


def parse(ptx: str) -> Program:
    return Program(ptx, find)


def launch(
    program: Program,
    arguments: Sequence[Any],
    grid: tuple[int, int, int],
    shared_bytes: int,
    tensors: Mapping[str, Tensor],
) -> None:
    """arguments: numpy's scalars, addresses among them; tensors: whose memory may be read and written.

    CTAs come in no order that is to be relied on.
    """
    places = itertools.product(*(range(size) for size in reversed(grid)))
    ctas = [(x, y, z) for z, y, x in places]
    order = Order(len(ctas), program.num_threads // WARP)
    memory = GlobalMemory(tensors, order)
    random.Random(len(ctas)).shuffle(ctas)
    at_once = max(1, _THREADS_AT_ONCE // program.num_threads)
    for begin in range(0, len(ctas), at_once):
        threads = Threads(program, ctas[begin : begin + at_once], grid, arguments, memory, order, shared_bytes)
        with np.errstate(all="ignore"):
            run(program, threads)


def run(program: Program, threads: Threads) -> None:
    flow = Flow(program, threads)
    while (position := flow.next()) < len(program.instructions):
        instruction = program.instructions[position]
        if instruction.predicate is not None:
            _guard(threads, threads.read(instruction.predicate, "pred"))
        if instruction.opcode == "bra":
            flow.branch(program.place_of(*instruction.operands))
        elif instruction.opcode == "brx":
            index, targets = instruction.operands
            flow.branch_by(threads.read(index, "u32"), program.places_of(targets))
        elif instruction.opcode == "ret":
            flow.end()
        elif threads.active is None or threads.active.any():
            _execute(instruction, threads)
            if threads.parked is not None or threads.woken is not None:
                flow.wait()


def _guard(threads: Threads, holds: Array) -> None:
    if threads.active is not None:
        holds = holds & threads.active
    threads.active = None if holds.all() else holds


def _execute(instruction: Instruction, threads: Threads) -> None:
    assert instruction.execute is not None
    try:
        instruction.execute(threads, instruction)
    except Exception as error:
        error.add_note(f"at {instruction.text}")
        raise
