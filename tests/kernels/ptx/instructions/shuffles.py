"""What threads of a warp tell one another (PTX ISA, 9.7.9.6, 9.7.13)."""

import numpy as np

from ..program import Instruction, UnknownInstructionError
from ..threads import WARP, Threads
from .registry import executes


@executes("shfl", modifiers="sync bfly up down idx", types=("b32",))
def shuffle(threads: Threads, instruction: Instruction) -> None:
    """The value of another lane of the segment; where there is none, the lane's own, and the predicate is false."""
    target, source, *control = instruction.operands
    chosen, clamps, members = (threads.read(each, "u32").astype(np.int64) for each in control)
    _require_warps(threads, instruction, members)
    values, lane = threads.read(source, "u32"), np.arange(threads.count) % WARP
    clamp, segment = clamps & 31, (clamps >> 8) & 31
    first, last = lane & segment, (lane & segment) | (clamp & ~segment & 31)
    mode = instruction.modifiers[1]
    if mode == "up":
        other = lane - chosen
        exists = other >= last
    else:
        other = {"bfly": lane ^ chosen, "down": lane + chosen, "idx": first | (chosen & ~segment & 31)}[mode]
        exists = other <= last
    warp = np.arange(threads.count) - lane
    results = values[warp + np.where(exists, other, lane)], exists
    for each, result in zip(target if isinstance(target, tuple) else (target,), results, strict=False):
        threads.write(each, result)


@executes("redux", modifiers="sync add min max and or xor", types=("u32", "s32", "b32"))
def reduce(threads: Threads, instruction: Instruction) -> None:
    target, source, members = instruction.operands
    _require_warps(threads, instruction, threads.read(members, "u32").astype(np.int64))
    lanes = threads.read(source, instruction.type).reshape(-1, WARP)
    operation = {
        "add": np.add,
        "min": np.minimum,
        "max": np.maximum,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }[instruction.modifiers[1]]
    threads.write(target, np.repeat(operation.reduce(lanes, axis=1, dtype=lanes.dtype), WARP))


@executes("elect", modifiers="sync")
def elect(threads: Threads, instruction: Instruction) -> None:
    """One lane of each warp, which all of them are told."""
    results, members = instruction.operands
    assert isinstance(results, tuple)
    leader, is_leader = results
    _require_warps(threads, instruction, threads.read(members, "u32").astype(np.int64))
    threads.write(leader, np.zeros(threads.count, np.uint32))
    threads.write(is_leader, np.arange(threads.count) % WARP == 0)


@executes("bar", modifiers="warp sync")
def wait_for_warp(threads: Threads, instruction: Instruction) -> None:
    (members,) = instruction.operands
    _require_warps(threads, instruction, threads.read(members, "u32").astype(np.int64))


@executes("fence", modifiers="proxy async shared::cta")
@executes("membar", modifiers="cta gl")
@executes("griddepcontrol", modifiers="wait launch_dependents")
def order_accesses(threads: Threads, instruction: Instruction) -> None:
    """In lock step they are ordered, and so is one launch after the other: what a missing one does is not seen."""


def _require_warps(threads: Threads, instruction: Instruction, members: np.ndarray) -> None:
    """Of a part of a warp nothing is known."""
    threads.acting_together(WARP, instruction)
    if (members[threads.acting()] != 0xFFFFFFFF).any():
        raise UnknownInstructionError(instruction.text)
