"""Where the sequences of a batch have their states."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from .sequence_table import SequenceTable


class Span(NamedTuple):
    """A sequence's tokens, which of the batch's is the first, and its slots."""

    start: int
    length: int
    read: int
    write: int


class LoneTokens(NamedTuple):
    """Of the sequences of one token: its place among the batch's, and both slots. Each [num_sequences] int64."""

    places: Tensor
    read: Tensor
    write: Tensor


@dataclass(frozen=True)
class StateSlots:
    """How many tokens each sequence of a batch has, which slot's state it goes on from, and in which it leaves its own.

    Nobody writes a slot that another one reads or writes; whoever reads the slot that it writes changes it in place.
    A sequence without tokens is padding: neither of its slots is looked at. What is derived from this, all layers
    share.
    """

    query_lens: Sequence[int]
    read: Sequence[int]
    write: Sequence[int]
    device: torch.device

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens)

    @cached_property
    def spans(self) -> list[Span]:
        """Of the sequences that have tokens."""
        ends = accumulate(self.query_lens)
        sequences = zip(ends, self.query_lens, self.read, self.write, strict=True)
        return [Span(end - length, length, *both) for end, length, *both in sequences if length]

    @cached_property
    def longer(self) -> list[Span]:
        """Of more than one token."""
        return [span for span in self.spans if span.length > 1]

    @cached_property
    def lone_tokens(self) -> LoneTokens:
        lone = [(start, read, write) for start, length, read, write in self.spans if length == 1]
        return LoneTokens(*torch.tensor(lone, dtype=torch.int64, device=self.device).view(-1, 3).unbind(1))

    @cached_property
    def table(self) -> SequenceTable:
        """As the kernels of a GPU read it."""
        return SequenceTable.of(self.query_lens, self.read, self.write, self.device)

    def check_device(self, device: torch.device) -> None:
        """Raise `ValueError` unless the table is there."""
        if self.table.memory.device != device:
            raise ValueError(f"slots are on {self.device}, and must be on {device}")
