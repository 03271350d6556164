"""Sequences that all decode, as columns that are kept from step to step. Free of torch."""

from array import array
from collections import deque
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple, Self

import numpy
from numpy.typing import NDArray

from .scheduled_sequence import ScheduledSequence
from .sequence import Sequence


class BegunBlocks(NamedTuple):
    """Which rows begin a block, the how manieth of theirs it is, and which one; [m] int64 each."""

    rows: NDArray[numpy.int64]
    columns: NDArray[numpy.int64]
    blocks: NDArray[numpy.int64]


_NONE_BEGUN = BegunBlocks(*numpy.empty((3, 0), dtype=numpy.int64))


class DecodeRows:
    """What every step of the same sequences, one token of each, has in common; a step only moves them on.

    `places`: [2, n] int64, the slot where each writes its next key and value, and that token's position. `num_steps`:
    how many were counted as computed. `begun`: the blocks that the next step begins.

    What a step counts, of all alike, is counted once, and noted in the sequences by `settle`: before that their own
    counts are stale.
    """

    def __init__(self, scheduled: list[ScheduledSequence]) -> None:
        self.scheduled = scheduled
        self.sequences: list[Sequence] = [item[0] for item in scheduled]
        self._token_ids = [each.token_ids for each in self.sequences]
        self.query_lens = [1] * len(scheduled)
        self.block_tables = [each.block_table for each in self.sequences]
        self.block_size = block_size = self.sequences[0].block_size
        starts = [each.num_computed_tokens for each in self.sequences]
        # One array, so that both are on the device with one copy. Slots first: kernels like an aligned beginning.
        self.places: NDArray[numpy.int64] = numpy.array([self._slots(starts), starts])
        self.num_steps = 0
        # By where in its block a row was to write at first. A step moves them all by one, and so their lists with them.
        self._rows_at: list[list[int]] = [[] for _ in range(block_size)]
        for row, start in enumerate(starts):
            self._rows_at[start % block_size].append(row)
        self.begun = _NONE_BEGUN
        self._num_unsettled_computed = 0
        self._num_unsettled_unread = 0

    @classmethod
    def of(cls, scheduled: list[ScheduledSequence]) -> Self | None:
        """None where somebody does something else, or is to be looked at more closely."""
        return cls(scheduled) if scheduled and all(map(_decodes, scheduled)) else None

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def context_lens(self) -> SequenceOf[int]:
        """How many tokens each has, the next one included."""
        # A sequence of integers that is no list: mostly nobody looks at each of them.
        lens: NDArray[numpy.int64] = self.places[1] + 1
        return lens.data

    @property
    def num_unread_tokens(self) -> int:
        """How many each has: the same number."""
        return self.sequences[0].num_unread_tokens + self._num_unsettled_unread

    @property
    def beginning(self) -> list[int]:
        """The rows whose next token begins a block."""
        return self._rows_at[-self.num_steps % self.block_size]

    @property
    def filling(self) -> list[int]:
        """The rows whose next token fills a block."""
        return self._rows_at[(-1 - self.num_steps) % self.block_size]

    def begin_blocks(self, blocks: SequenceOf[int]) -> None:
        """Give each row of `beginning` a block."""
        if not blocks:
            self.begun = _NONE_BEGUN
            return
        rows = self.beginning
        for row, block in zip(rows, blocks, strict=True):
            self.block_tables[row].append(block)
        places = numpy.array((rows, blocks))
        self.begun = BegunBlocks(places[0], self.places[1, places[0]] // self.block_size, places[1])
        self.places[0, places[0]] = places[1] * self.block_size

    def advance(self, num_unread: int = 0) -> None:
        """Count a token of each as computed, and so many more as unread. What was handed out before stays as it was."""
        self.places = self.places + 1
        self.num_steps += 1
        self._num_unsettled_computed += 1
        self._num_unsettled_unread += num_unread

    def append(self, token_ids: SequenceOf[int]) -> None:
        """Each gets its next token, the first of those that are unread if there are any."""
        assert len(token_ids) == len(self)
        # A loop that is not Python's.
        deque(map(array.append, self._token_ids, token_ids), maxlen=0)
        if self.num_unread_tokens:
            self._num_unsettled_unread -= 1

    def settle(self) -> None:
        """Have the sequences' own counts say what was counted of all of them."""
        num_computed, num_unread = self._num_unsettled_computed, self._num_unsettled_unread
        if not num_computed and not num_unread:
            return
        for sequence in self.sequences:
            sequence.num_computed_tokens += num_computed
            sequence.num_unread_tokens += num_unread
        self._num_unsettled_computed = self._num_unsettled_unread = 0

    def check(self) -> None:
        """Assert that the columns say what the sequences do. For tests."""
        starts = [each.num_computed_tokens + self._num_unsettled_computed for each in self.sequences]
        assert len({each.num_unread_tokens for each in self.sequences}) == 1, "tokens of some alone are unread"
        assert len({each.num_uncomputed_tokens for each in self.sequences}) == 1, "tokens of some alone are computed"
        assert self.places[1].tolist() == starts, "a position is stale"
        assert self.beginning == [row for row, start in enumerate(starts) if not start % self.block_size]
        for sequence, table in zip(self.sequences, self.block_tables, strict=True):
            assert sequence.block_table is table, "a block table is stale"
        # Those of `beginning` have no block yet.
        for slot, start, table in zip(self.places[0].tolist(), starts, self.block_tables, strict=True):
            block, offset = divmod(start, self.block_size)
            assert not offset or slot == table[block] * self.block_size + offset, "a slot is stale"

    def _slots(self, starts: list[int]) -> list[int]:
        """Where a token at each of these positions, one a row, is written."""
        size = self.block_size
        return [
            table[start // size] * size + start % size for table, start in zip(self.block_tables, starts, strict=True)
        ]


def _decodes(scheduled: ScheduledSequence) -> bool:
    """Whether it computes one token, which the sequence has sampled before."""
    sequence, num_tokens, reaches_end, is_new, _ = scheduled
    return (
        num_tokens == 1
        and reaches_end
        and not is_new
        and sequence.choice_node is None
        and sequence.prompt_logprobs is None
        and not sequence.spares_state
        and sequence.num_tokens > sequence.num_prompt_tokens
    )
