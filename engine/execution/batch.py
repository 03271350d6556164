"""A step's scheduled sequences as tensors."""

from array import array
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from weakref import ref

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...kernels.paged_attention import AttentionMetadata, DecodeSeries, DecodeStep
from ...kernels.recurrent_states import StateSlots
from ..kv_cache.state_pool import NULL_STATE
from ..models.last_tokens import LastTokens
from ..sampling.prompt_reader import PromptReader
from ..scheduling.decode_rows import DecodeRows
from ..scheduling.scheduled_sequence import ScheduledSequence
from ..scheduling.sequence import Sequence
from ..transfer import all_to_device, to_device
from ..vision.encoder import ImageTokens

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
    """token_ids: [num_tokens] int64, the sequences one after the other. places: [2, num_tokens] int64, on the host:
    where each token's key and value are written, and its position.

    `last_token_index`: [num_sampling] int64, the tokens whose logits are wanted: the last one of each sequence that
    this step brings to its end, and its draft, in the order scheduled. `prompt_reader`, if any, is to be shown the
    prompts' logits. `last_tokens`, if any, are all that the last layer has to compute. `adapters`, if any token has
    one: [num_tokens], on the host, the number of each one's LoRA adapter, or 0. `images`, if any token is an image's.
    `states`: where the sequences have theirs, of a model whose layers have some.
    """

    token_ids: Tensor
    places: Ints
    attention: AttentionMetadata
    last_token_index: Tensor
    prompt_reader: PromptReader | None = None
    last_tokens: LastTokens | None = None
    adapters: Ints | None = None
    images: ImageTokens | None = None
    states: StateSlots | None = None

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
        num_wanted = numpy.array(gathered.num_wanted)
        attention = AttentionMetadata(
            query_lens=gathered.lens,
            context_lens=(layout.starts + layout.lens).tolist(),
            block_tables=[item.sequence.block_table for item in scheduled],
            block_size=block_size,
            device=device,
        )
        prompt_reader = PromptReader.of(scheduled)
        here = gathered.token_ids, layout.last(num_wanted), gathered.unread, gathered.unread_rows
        token_ids, last_token_index, unread, unread_rows = all_to_device(here, device)
        return cls(
            token_ids=gathered.filled(token_ids, unread, unread_rows, sampled),
            # Slots first: kernels like an aligned beginning.
            places=numpy.stack((slots, layout.positions)),
            attention=attention,
            last_token_index=last_token_index,
            prompt_reader=prompt_reader,
            last_tokens=_last_tokens(attention, layout, num_wanted) if prompt_reader is None else None,
            states=_state_slots([item.sequence for item in scheduled], gathered.lens, device),
        )

    def wanted(self, hidden: Tensor) -> Tensor:
        """Of what was computed of all its tokens, [num_tokens, any], what logits are wanted of."""
        return hidden if len(self.last_token_index) == len(hidden) else hidden[self.last_token_index]

    @property
    def slots(self) -> Tensor:
        """[num_tokens] int64."""
        return self._places_there[0]

    @property
    def positions(self) -> Tensor:
        """[num_tokens] int64."""
        return self._places_there[1]

    @cached_property
    def _places_there(self) -> Tensor:
        # Both with one copy, and none where somebody else sees to it.
        return to_device(self.places, self.attention.device)


class DecodeBatches:
    """The batches of sequences that decode, each made from the one before it as long as the sequences are the same."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._decodes: ref[DecodeRows] | None = None
        self._series = DecodeSeries()
        self._states: StateSlots | None = None

    def batch(self, decodes: DecodeRows, token_ids: Tensor) -> Batch:
        """Their next step. token_ids: [n] int64, what the step before it has sampled."""
        if self._decodes is None or self._decodes() is not decodes:
            self._decodes, self._series = ref(decodes), DecodeSeries()
            self._states = _state_slots(decodes.sequences, decodes.query_lens, self._device)
        attention = AttentionMetadata(
            query_lens=decodes.query_lens,
            context_lens=decodes.context_lens,
            block_tables=decodes.block_tables,
            block_size=decodes.block_size,
            device=self._device,
            decode_step=DecodeStep(self._series, decodes.num_steps, *decodes.begun),
        )
        wanted = _every_token(len(decodes), self._device)
        return Batch(token_ids, decodes.places, attention, wanted, states=self._states)


@lru_cache(maxsize=1)
def _every_token(number: int, device: torch.device) -> Tensor:
    """[number] int64, counting from 0. Mostly as many sequences decode as in the step before."""
    return torch.arange(number, device=device)


def _state_slots(
    sequences: SequenceOf[Sequence], query_lens: SequenceOf[int], device: torch.device
) -> StateSlots | None:
    """None where the model has no states."""
    if sequences[0].state == NULL_STATE:
        return None
    read, write = [each.read_state for each in sequences], [each.state for each in sequences]
    return StateSlots(query_lens, read, write, device)


def _last_tokens(attention: AttentionMetadata, layout: "_Layout", num_wanted: Ints) -> LastTokens | None:
    """None where it would not pay, and on a GPU, where it was not measured."""
    # Of a sequence of which nothing is wanted the last layer computes a token all the same.
    num_last, device = num_wanted.clip(1), attention.device
    if device.type != "cpu" or len(layout.positions) < _MIN_TOKENS_PER_SEQUENCE * num_last.sum():
        return None
    return LastTokens(
        index=to_device(layout.last(num_last), device),
        attention=replace(attention, query_lens=num_last.tolist()),
        sampled=to_device((num_wanted > 0).repeat(num_last).nonzero()[0], device),
    )


@dataclass(frozen=True, slots=True)
class _Gathered:
    """The sequences' new tokens and written blocks, one sequence after the other, and how many each has of both.

    unread, unread_rows: places among the tokens that are filled on the device, and with which rows of what the step in
    flight samples. starts: each sequence's first new token's position. num_wanted: of how many of its tokens logits are
    wanted.
    """

    token_ids: "array[int]"
    unread: list[int]
    unread_rows: list[int]
    blocks: "array[int]"
    starts: "array[int]"
    lens: "array[int]"
    num_blocks: "array[int]"
    num_wanted: "array[int]"

    @classmethod
    def of(
        cls, scheduled: SequenceOf[ScheduledSequence], block_size: int, sampled: SampledTokens | None
    ) -> "_Gathered":
        token_ids = array("i")
        unread: list[int] = []
        unread_rows: list[int] = []
        blocks = array("i")
        starts, lens, num_blocks, num_wanted = (array("q") for _ in range(4))
        for sequence, num_tokens, reaches_end, _, draft in scheduled:
            start, known = sequence.num_computed_tokens, sequence.token_ids
            end = start + num_tokens
            # Mostly it is one token in one block: slices would take twice the time.
            if num_tokens > 1:
                token_ids += known[start:end]
            elif start < len(known):
                token_ids.append(known[start])
            if draft:
                token_ids.extend(draft)
            elif end > len(known):
                assert sampled is not None
                unread.append(len(token_ids))
                unread_rows.append(sampled.rows[sequence])
                # Overwritten on the device.
                token_ids.append(0)
            first, last = start // block_size, (end - 1) // block_size
            if first == last:
                blocks.append(sequence.block_table[first])
            else:
                blocks += sequence.block_table[first : last + 1]
            starts.append(start)
            lens.append(num_tokens)
            num_blocks.append(last - first + 1)
            num_wanted.append(reaches_end + len(draft))
        return cls(token_ids, unread, unread_rows, blocks, starts, lens, num_blocks, num_wanted)

    def filled(self, token_ids: Tensor, unread: Tensor, unread_rows: Tensor, sampled: SampledTokens | None) -> Tensor:
        """The tokens, those of the step in flight among them. The first three: ours, on the device."""
        if sampled is None or not self.unread:
            return token_ids
        if self.unread_rows != list(range(len(sampled.tokens))):
            tokens = sampled.tokens.index_select(0, unread_rows)
        else:
            tokens = sampled.tokens
        # Mostly every sequence of the step goes on by its token.
        if len(self.unread) == len(token_ids):
            return tokens
        return token_ids.index_copy_(0, unread, tokens)


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
    def of(cls, starts: "array[int]", lens: "array[int]", num_blocks: "array[int]") -> "_Layout":
        begin, length, written = numpy.array(starts), numpy.array(lens), numpy.array(num_blocks)
        ends = length.cumsum()
        first_blocks = written.cumsum() - written
        positions = numpy.arange(ends[-1]) + (begin - (ends - length)).repeat(length)
        return cls(begin, length, ends, first_blocks, positions)

    def last(self, numbers: Ints) -> Ints:
        """The places among the batch's tokens of so many of each sequence's last ones."""
        totals = numbers.cumsum()
        places: Ints = numpy.arange(totals[-1]) + (self.ends - totals).repeat(numbers)
        return places

    def slots(self, blocks: Ints, block_size: int) -> Ints:
        """Cache slots of the tokens: `blocks` are those that the sequences write into, one after the other."""
        place = self.positions // block_size + (self.first_blocks - self.starts // block_size).repeat(self.lens)
        return blocks[place] * block_size + self.positions % block_size
