"""A launch: its CTAs some at a time, their threads in lock step, those that are apart by turns."""

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from .conflicts import Order
from .instructions import find
from .memory import GlobalMemory
from .program import Instruction, Label, Program
from .threads import WARP, Threads
from .values import Array

# Enough that numpy's calls cost little beside what they do.
_THREADS_AT_ONCE = 2048
_NEVER = np.iinfo(np.int64).max


class Flow:
    """Which instruction is next, and for which threads: those that are the least far, so that all meet again."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._position = 0
        # While threads are apart.
        self._positions: Array | None = None

    def next(self) -> int:
        """Go on by one instruction; the threads that act are those that came to it."""
        if self._positions is None:
            self._threads.active = None
            self._position += 1
            return self._position - 1
        first = int(self._positions.min())
        active = self._positions == first
        if active.all():
            self._positions = None
            self._position = first
            return self.next() if first != _NEVER else first
        self._positions[active] += 1
        self._threads.active = active
        return first

    def branch(self, target: int) -> None:
        """Threads that act go on there."""
        active = self._threads.active
        if active is None:
            self._position = target
            return
        if not active.any():
            return
        if self._positions is None:
            self._positions = np.full(self._threads.count, self._position)
        self._positions[active] = target

    def end(self) -> None:
        """Threads that act have returned."""
        active = self._threads.active
        self._threads.ended |= True if active is None else active
        self.branch(_NEVER)


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
    flow = Flow(threads)
    while (position := flow.next()) < len(program.instructions):
        instruction = program.instructions[position]
        if instruction.predicate is not None:
            _guard(threads, threads.read(instruction.predicate, "pred"))
        if instruction.opcode == "bra":
            (label,) = instruction.operands
            assert isinstance(label, Label)
            flow.branch(program.labels[label.name])
        elif instruction.opcode == "ret":
            flow.end()
        elif threads.active is None or threads.active.any():
            _execute(instruction, threads)


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
