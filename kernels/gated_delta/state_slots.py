"""Where the sequences of a batch have their states."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

# The state of a sequence of which nothing is computed: never written, so what lies in it stays zero.
NULL_STATE = 0


@dataclass(frozen=True)
class StateSlots:
    """How many tokens each sequence of a batch has, which slot's state it goes on from, and in which it leaves its own.

    Nobody writes a slot that another one reads or writes; whoever reads the slot that it writes changes it in place.
    """

    query_lens: Sequence[int]
    read: Sequence[int]
    write: Sequence[int]
    device: torch.device

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens)
