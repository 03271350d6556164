"""Sequences that all decode, as columns that are kept from step to step. Free of torch."""

from collections.abc import Sequence as SequenceOf
from typing import Self

import numpy
from numpy.typing import NDArray

from .scheduled_sequence import ScheduledSequence
from .sequence import Sequence


class DecodeRows:
    """What every step of the same sequences, one token of each, has in common; a step only moves them on.

    `starts`: [n] int64, the position that each computes next. `blocks`: [n] int64, the KV block that it writes to.
    """

    def __init__(self, scheduled: list[ScheduledSequence]) -> None:
        self.scheduled = scheduled
        self.sequences: list[Sequence] = [item[0] for item in scheduled]
        self._token_ids = [each.token_ids for each in self.sequences]
        self.query_lens = [1] * len(scheduled)
        self.block_tables = [each.block_table for each in self.sequences]
        self.block_size = block_size = self.sequences[0].block_size
        starts = [each.num_computed_tokens for each in self.sequences]
        self.starts: NDArray[numpy.int64] = numpy.array(starts)
        self.blocks: NDArray[numpy.int64] = numpy.array(
            [table[start // block_size] for table, start in zip(self.block_tables, starts, strict=True)]
        )

    @classmethod
    def of(cls, scheduled: list[ScheduledSequence]) -> Self | None:
        """None where somebody does something else, or is to be looked at more closely."""
        return cls(scheduled) if scheduled and all(map(_decodes, scheduled)) else None

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def slots(self) -> NDArray[numpy.int64]:
        """[n] int64, where each writes its key and value."""
        slots: NDArray[numpy.int64] = self.blocks * self.block_size + self.starts % self.block_size
        return slots

    def at_block_edges(self) -> tuple[list[int], list[int]]:
        """The rows whose next token begins a block, and those whose next token fills one."""
        offsets = self.starts % self.block_size
        return (offsets == 0).nonzero()[0].tolist(), (offsets == self.block_size - 1).nonzero()[0].tolist()

    def begin_block(self, row: int) -> None:
        """Note the block that the row's block table now has for its next token."""
        self.blocks[row] = self.block_tables[row][self.starts[row] // self.block_size]

    def advance(self) -> None:
        """Count a token of each as computed. What was handed out before stays as it was."""
        self.starts = self.starts + 1
        for sequence in self.sequences:
            sequence.num_computed_tokens += 1

    def append(self, token_ids: SequenceOf[int]) -> None:
        """Each gets its next token."""
        for known, token in zip(self._token_ids, token_ids, strict=True):
            known.append(token)

    def check(self) -> None:
        """Assert that the columns say what the sequences do. For tests."""
        assert self.starts.tolist() == [each.num_computed_tokens for each in self.sequences], "a position is stale"
        for sequence, table in zip(self.sequences, self.block_tables, strict=True):
            assert sequence.block_table is table, "a block table is stale"


def _decodes(scheduled: ScheduledSequence) -> bool:
    """Whether it computes one token, which the sequence has sampled before."""
    sequence, num_tokens, reaches_end, is_new = scheduled
    return (
        num_tokens == 1
        and reaches_end
        and not is_new
        and sequence.choice_node is None
        and sequence.prompt_logprobs is None
        and sequence.num_tokens > sequence.num_prompt_tokens
    )
