"""A step's scheduled sequences as tensors."""

from array import array
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...kernels.paged_attention import AttentionMetadata
from ..models.last_tokens import LastTokens
from ..sampling.prompt_reader import PromptReader
from ..scheduling.decode_rows import DecodeRows
from ..scheduling.scheduled_sequence import ScheduledSequence
from ..scheduling.sequence import Sequence
from ..transfer import to_device

Ints = NDArray[numpy.int64]

# Where a sequence has fewer tokens than this on the average, sparing the last layer some is not worth a second layout.
_MIN_TOKENS_PER_SEQUENCE = 2


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """What a step in flight samples: tokens ([n] int64, on the device), and whose each row is."""

    tokens: Tensor
    rows: Mapping[Sequence, int]


@dataclass(frozen=True)
class Batch:
    """token_ids, positions, slots: [num_tokens] int64, the sequences one after the other.

    `last_token_index`: [num_sampling] int64, the tokens whose logits are wanted: the last one of each sequence that
    this step brings to its end, in the order scheduled. `prompt_reader`, if any, is to be shown the prompts' logits.
    `last_tokens`, if any, are all that the last layer has to compute.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    attention: AttentionMetadata
    last_token_index: Tensor
    prompt_reader: PromptReader | None = None
    last_tokens: LastTokens | None = None

    @classmethod
    def build(
        cls,
        scheduled: SequenceOf[ScheduledSequence],
        block_size: int,
        device: torch.device,
        sampled: SampledTokens | None = None,
    ) -> "Batch":
        """`sampled`: the tokens of the step in flight, of which this one's are those that nobody has read."""
        gathered = _Gathered.of(scheduled, block_size, sampled)
        layout = _Layout.of(gathered.starts, gathered.lens, gathered.num_blocks)
        slots = layout.slots(numpy.array(gathered.blocks), block_size)
        reaches_end = numpy.array([item.reaches_end for item in scheduled])
        attention = AttentionMetadata(
            query_lens=gathered.lens,
            context_lens=(layout.starts + layout.lens).tolist(),
            block_tables=[item.sequence.block_table for item in scheduled],
            block_size=block_size,
            device=device,
        )
        prompt_reader = PromptReader.of(scheduled)
        return cls(
            token_ids=gathered.filled(device, sampled),
            positions=to_device(layout.positions, device),
            slots=to_device(slots, device),
            attention=attention,
            last_token_index=to_device(layout.ends[reaches_end] - 1, device),
            prompt_reader=prompt_reader,
            last_tokens=_last_tokens(attention, layout, reaches_end) if prompt_reader is None else None,
        )

    @classmethod
    def of_decodes(cls, decodes: DecodeRows, token_ids: Tensor, device: torch.device) -> "Batch":
        """The next step of sequences that decode. token_ids: [n] int64, what the step before it has sampled."""
        slots, positions = to_device(decodes.places, device).unbind()
        attention = AttentionMetadata(
            query_lens=decodes.query_lens,
            context_lens=decodes.context_lens,
            block_tables=decodes.block_tables,
            block_size=decodes.block_size,
            device=device,
        )
        return cls(token_ids, positions, slots, attention, _every_token(len(decodes), device))


@lru_cache(maxsize=1)
def _every_token(number: int, device: torch.device) -> Tensor:
    """[number] int64, counting from 0. Mostly as many sequences decode as in the step before."""
    return torch.arange(number, device=device)


def _last_tokens(
    attention: AttentionMetadata, layout: "_Layout", reaches_end: NDArray[numpy.bool_]
) -> LastTokens | None:
    """None where it would not pay, and on a GPU, where it was not measured."""
    num_sequences, device = len(layout.lens), attention.device
    if device.type != "cpu" or len(layout.positions) < _MIN_TOKENS_PER_SEQUENCE * num_sequences:
        return None
    return LastTokens(
        index=to_device(layout.ends - 1, device),
        attention=replace(attention, query_lens=[1] * num_sequences),
        sampled=to_device(reaches_end.nonzero()[0], device),
    )


@dataclass(frozen=True, slots=True)
class _Gathered:
    """The sequences' new tokens and written blocks, one sequence after the other, and how many each has of both.

    unread, unread_rows: places among the tokens that are filled on the device, and with which rows of what the step in
    flight samples. starts: each sequence's first new token's position.
    """

    token_ids: "array[int]"
    unread: list[int]
    unread_rows: list[int]
    blocks: list[int]
    starts: list[int]
    lens: list[int]
    num_blocks: list[int]

    @classmethod
    def of(
        cls, scheduled: SequenceOf[ScheduledSequence], block_size: int, sampled: SampledTokens | None
    ) -> "_Gathered":
        token_ids = array("i")
        unread: list[int] = []
        unread_rows: list[int] = []
        blocks: list[int] = []
        starts: list[int] = []
        lens: list[int] = []
        num_blocks: list[int] = []
        for sequence, num_tokens, _, _ in scheduled:
            start = sequence.num_computed_tokens
            end = start + num_tokens
            token_ids += sequence.token_ids[start:end]
            if end > len(sequence.token_ids):
                assert sampled is not None
                unread.append(len(token_ids))
                unread_rows.append(sampled.rows[sequence])
                # Overwritten on the device.
                token_ids.append(0)
            written = sequence.block_table[start // block_size : (end - 1) // block_size + 1]
            blocks += written
            starts.append(start)
            lens.append(num_tokens)
            num_blocks.append(len(written))
        return cls(token_ids, unread, unread_rows, blocks, starts, lens, num_blocks)

    def filled(self, device: torch.device, sampled: SampledTokens | None) -> Tensor:
        """The tokens on the device, those of the step in flight among them."""
        token_ids = to_device(self.token_ids, device)
        if sampled is None or not self.unread:
            return token_ids
        if self.unread_rows != list(range(len(sampled.tokens))):
            tokens = sampled.tokens.index_select(0, to_device(self.unread_rows, device))
        else:
            tokens = sampled.tokens
        # Mostly every sequence of the step goes on by its token.
        if len(self.unread) == len(token_ids):
            return tokens
        return token_ids.index_copy_(0, to_device(self.unread, device), tokens)


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
