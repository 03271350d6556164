"""A step's scheduled sequences as tensors."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..kernels.paged_attention import AttentionMetadata
from .prompt_reader import PromptReader
from .step_plan import ScheduledSequence

Ints = NDArray[numpy.int64]


@dataclass(frozen=True)
class Batch:
    """token_ids, positions, slots: [num_tokens] int64, the sequences one after the other.

    `last_token_index`: [num_sampling] int64, the tokens whose logits are wanted: the last one of each sequence that
    this step brings to its end, in the order scheduled. `prompt_reader`, if any, is to be shown the prompts' logits.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    attention: AttentionMetadata
    last_token_index: Tensor
    prompt_reader: PromptReader | None = None

    @classmethod
    def build(cls, scheduled: SequenceOf[ScheduledSequence], block_size: int, device: torch.device) -> "Batch":
        token_ids: list[int] = []
        blocks: list[int] = []
        starts: list[int] = []
        lens: list[int] = []
        num_blocks: list[int] = []
        for sequence, num_tokens, _, _ in scheduled:
            start = sequence.num_computed_tokens
            end = start + num_tokens
            token_ids += sequence.token_ids[start:end]
            written = sequence.block_table[start // block_size : (end - 1) // block_size + 1]
            blocks += written
            starts.append(start)
            lens.append(num_tokens)
            num_blocks.append(len(written))
        layout = _Layout.of(starts, lens, num_blocks)
        slots = layout.slots(numpy.array(blocks), block_size)
        reaches_end = numpy.array([item.reaches_end for item in scheduled])
        attention = AttentionMetadata(
            query_lens=lens,
            context_lens=(layout.starts + layout.lens).tolist(),
            block_tables=[item.sequence.block_table for item in scheduled],
            block_size=block_size,
            device=device,
        )
        return cls(
            token_ids=torch.from_numpy(numpy.array(token_ids)).to(device),
            positions=torch.from_numpy(layout.positions).to(device),
            slots=torch.from_numpy(slots).to(device),
            attention=attention,
            last_token_index=torch.from_numpy(layout.ends[reaches_end] - 1).to(device),
            prompt_reader=PromptReader.of(scheduled),
        )


@dataclass(frozen=True)
class _Layout:
    """starts, lens, ends, first_blocks: [n], of each sequence: its first new token's position, how many there are,
    where they end among the batch's, and where its written blocks begin among the batch's. positions: [num_tokens].
    """

    starts: Ints
    lens: Ints
    ends: Ints
    first_blocks: Ints
    positions: Ints

    @classmethod
    def of(cls, starts: list[int], lens: list[int], num_blocks: list[int]) -> "_Layout":
        begin, length, written = numpy.array(starts), numpy.array(lens), numpy.array(num_blocks)
        ends = length.cumsum()
        first_blocks = written.cumsum() - written
        positions = numpy.arange(ends[-1]) + (begin - (ends - length)).repeat(length)
        return cls(begin, length, ends, first_blocks, positions)

    def slots(self, blocks: Ints, block_size: int) -> Ints:
        """Cache slots of the tokens: `blocks` are those that the sequences write into, one after the other."""
        place = self.positions // block_size + (self.first_blocks - self.starts // block_size).repeat(self.lens)
        return blocks[place] * block_size + self.positions % block_size
