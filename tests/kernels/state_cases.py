"""Where the sequences of tests have their states."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headrace.kernels.recurrent_states import StateSlots

from .tolerances import TOLERANCES

# What a sequence goes on from of which nothing is computed: zeros, and never written.
NULL_STATE = 0
LENGTHS = {
    "one": (1,),
    "few": (1, 2, 1, 16, 3),
    "mixed": (1, 63, 64, 65, 1),
    "long": (130, 17),
    "whole": (128,),
    "decodes": (1,) * 19,
    "padded": (1, 0, 0, 2, 33),
}


def slots_of(query_lens: Sequence[int], device: torch.device) -> StateSlots:
    """The first begins with nothing; of the others every second one goes on in place, and the rest somewhere else."""
    read = [NULL_STATE, *range(1, len(query_lens))]
    write = [slot if slot % 2 else len(query_lens) + slot for slot in read]
    return StateSlots(query_lens, read, write, device)


def states_of(slots: StateSlots, *shape: int) -> Tensor:
    """float32; NaN in those that are only written, or not even that."""
    states = torch.full((2 * len(slots.read), *shape), torch.nan)
    for slot in slots.read:
        states[slot] = 0.0 if slot == NULL_STATE else torch.randn(shape)
    return states.to(slots.device)


def assert_states(actual: Tensor, expected: Tensor, before: Tensor, slots: StateSlots, dtype: torch.dtype) -> None:
    """Those that are written, within the tolerance of what they are made of; all others, bit for bit as they were."""
    written = [span.write for span in slots.spans]
    others = [slot for slot in range(len(before)) if slot not in written]
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(actual[written], expected[written], rtol=tolerance, atol=tolerance)
    assert torch.equal(actual[others].view(torch.uint8), before[others].view(torch.uint8))


def load_two_of_four(slots: StateSlots) -> StateSlots:
    """Puts another step of decodes into the table of these four, as a graph does: two sequences, which it returns."""
    assert slots.table.num_few == 4
    slots.table.load((1, 1, 0, 0), (2, 0, 0, 0), (2, 5, 0, 0))
    return StateSlots((1, 1), (2, 0), (2, 5), slots.device)


def on(device: torch.device, given: dict[str, Any]) -> dict[str, Any]:
    """Tensors there, with the strides that they have."""
    if device.type == "cpu":
        return given
    moved = {
        name: torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device=device)
        for name, each in given.items()
        if isinstance(each, Tensor) and not each.is_meta
    }
    return given | moved
