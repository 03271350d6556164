"""What the compiled kernels of layers with states have in common."""

from array import array
from itertools import accumulate

from torch import Tensor

from ..native import InstructionSet, instruction_set
from .state_slots import StateSlots


class Places:
    """`StateSlots` as the kernels take them; the addresses hold as long as this does."""

    def __init__(self, slots: StateSlots) -> None:
        starts = accumulate(slots.query_lens, initial=0)
        self._arrays = [array("q", each) for each in (starts, slots.read, slots.write)]
        self.fields = *(each.buffer_info()[0] for each in self._arrays), len(slots.query_lens)


def uses_avx512(instructions: InstructionSet | None) -> bool:
    """Whether AVX-512 is among these, by default among all that the processor has."""
    return (instructions or instruction_set()) >= InstructionSet.AVX512


def has_dense_slots(states: Tensor) -> bool:
    """Whether each slot's state lies in memory without gaps; the slots themselves may be apart."""
    return states[:1].is_contiguous()
