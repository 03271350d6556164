"""Sums, extremes and exchanges in memory that no other thread comes between (PTX ISA, 9.7.13.4 f.)."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..program import Instruction, Operand
from ..threads import Threads
from ..values import UNSIGNED, Array, width_of
from .registry import executes

_MODIFIERS = "global relaxed acq_rel gpu cta add min max and or xor exch cas"
_TYPES = ("u32", "s32", "u64", "b32", "b64", "f32")


@executes("red", modifiers=_MODIFIERS, types=_TYPES)
def combine_in_memory(threads: Threads, instruction: Instruction) -> None:
    place, *sources = instruction.operands
    _update(threads, instruction, place, sources)


@executes("atom", modifiers=_MODIFIERS, types=_TYPES)
def fetch_and_combine(threads: Threads, instruction: Instruction) -> None:
    """Also tells what was there before."""
    target, place, *sources = instruction.operands
    threads.write(target, _update(threads, instruction, place, sources))


def _update(threads: Threads, instruction: Instruction, place: Operand, sources: Sequence[Operand]) -> Array:
    """One thread after another, in the order of their indices."""
    kind = instruction.type
    (operation,) = (each for each in instruction.modifiers if each in _OPERATIONS)
    before = np.zeros(threads.count, UNSIGNED[width_of(kind)])
    addresses = threads.addresses(place, "global")
    values = [threads.read(each, kind) for each in sources]
    for thread in threads.acting():
        operands = [each[thread] for each in values]

        def combine(held: Array, operands: list[Any] = operands) -> Array:
            number = held.view(operands[0].dtype)
            return _OPERATIONS[operation](number, *operands).astype(number.dtype).view(held.dtype)

        one = slice(thread, thread + 1)
        before[thread] = threads.memory.update(addresses[one], width_of(kind), combine, threads.agents[one])[0]
        if "acq_rel" in instruction.modifiers:
            threads.order.update(int(threads.programs[thread]), int(addresses[thread]), acquires=True, releases=True)
            threads.renew_agents()
    return before


_OPERATIONS: dict[str, Any] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "exch": lambda held, value: np.full_like(held, value),
    "cas": lambda held, expected, value: np.where(held == expected, value, held),
}
