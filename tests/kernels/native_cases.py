"""What tests of the compiled kernels of layers with states have in common."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from headrace.kernels.native import InstructionSet, instruction_set
from headrace.kernels.recurrent_states import StateSlots

from .tolerances import assert_close

WAYS = [
    (instructions, dtype)
    for instructions, dtype in (
        (InstructionSet.AVX2, torch.float32),
        (InstructionSet.AVX512, torch.float32),
        (InstructionSet.AVX512_BF16, torch.bfloat16),
    )
    if instructions <= instruction_set()
]
native_kernels = [
    pytest.mark.skipif(not WAYS, reason="needs the compiled kernels"),
    pytest.mark.usefixtures("_nan_filled_outputs"),
]
of_every_way = pytest.mark.parametrize(("instructions", "dtype"), WAYS, ids=lambda each: getattr(each, "name", ""))

# More and fewer tokens than kernels take together.
LENGTHS = [1, 2, 3, 15, 16, 17, 64, 130]


def some_slots(query_lens: Sequence[int]) -> StateSlots:
    """Every other sequence leaves its state where it was, the others in the next slot; one in three is nobody's."""
    firsts = range(1, 3 * len(query_lens) + 1, 3)
    writes = [first + index % 2 for index, first in enumerate(firsts)]
    return StateSlots(query_lens, firsts, writes, torch.device("cpu"))


def some_states(slots: StateSlots, dtype: torch.dtype, *shape: int) -> Tensor:
    """What nobody reads is NaN."""
    states = torch.full((3 * len(slots.read) + 1, *shape), torch.nan, dtype=dtype)
    for slot in slots.read:
        states[slot] = torch.randn(shape).to(dtype)
    return states


def check_states(states: Tensor, expected: Tensor, before: Tensor, slots: StateSlots) -> None:
    """Those that are written are close, the others what they were, to the bit."""
    written = list(slots.write)
    others = [slot for slot in range(len(states)) if slot not in written]
    assert_close(states[written], expected[written])
    assert torch.equal(states[others].nan_to_num(7), before[others].nan_to_num(7))
    assert torch.equal(states[others].isnan(), before[others].isnan())
