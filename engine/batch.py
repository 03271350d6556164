"""A step's scheduled sequences as tensors."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.paged_attention import AttentionMetadata
from .scheduler import ScheduledSequence


@dataclass(frozen=True)
class Batch:
    """token_ids, positions, slots: [num_tokens] int64, the sequences one after the other.

    `last_token_index`: [num_sampling] int64, the tokens whose logits are wanted: the last one of each sequence that
    this step brings to its end, in the order scheduled.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    attention: AttentionMetadata
    last_token_index: Tensor

    @classmethod
    def build(cls, scheduled: SequenceOf[ScheduledSequence], block_size: int, device: torch.device) -> "Batch":
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        last: list[int] = []
        for item in scheduled:
            sequence, start = item.sequence, item.sequence.num_computed_tokens
            end = start + item.num_tokens
            token_ids += sequence.token_ids[start:end]
            positions += range(start, end)
            slots += _slots(sequence.block_table, start, end, block_size)
            if item.reaches_end:
                last.append(len(token_ids) - 1)
        attention = AttentionMetadata(
            query_lens=[item.num_tokens for item in scheduled],
            context_lens=[item.sequence.num_computed_tokens + item.num_tokens for item in scheduled],
            block_tables=[item.sequence.block_table for item in scheduled],
            block_size=block_size,
            device=device,
        )
        return cls(
            token_ids=torch.tensor(token_ids, device=device),
            positions=torch.tensor(positions, device=device),
            slots=torch.tensor(slots, device=device),
            attention=attention,
            last_token_index=torch.tensor(last, dtype=torch.int64, device=device),
        )


def _slots(block_table: list[int], start: int, end: int, block_size: int) -> list[int]:
    """Cache slots of the tokens from `start` to `end`, block by block."""
    slots: list[int] = []
    while start < end:
        stop = min(end, (start // block_size + 1) * block_size)
        first = block_table[start // block_size] * block_size + start % block_size
        slots += range(first, first + stop - start)
        start = stop
    return slots
