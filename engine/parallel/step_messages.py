"""A step's batch as a message, and back. Where the same sequences decode on, only the blocks that begin are told."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from ...kernels.paged_attention import AttentionMetadata, DecodeSeries, DecodeStep
from ...kernels.recurrent_states import StateSlots
from ..execution.batch import Batch
from ..models.last_tokens import LastTokens
from ..sampling.prompt_reader import PromptPlace, PromptReader
from ..sharding.ranks import Ranks
from ..transfer import to_device
from .messages import Ints, LastRows, NextStep, WholeStep


class StepWriter:
    """Makes the messages, in the order of the steps."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._last: DecodeStep | None = None

    def message(self, batch: Batch) -> WholeStep | NextStep:
        last, step = self._last, batch.attention.decode_step
        self._last = step
        if step is not None and step.follows(last):
            return NextStep(_packed((step.rows, step.blocks)))
        return self._whole(batch)

    def _whole(self, batch: Batch) -> WholeStep:
        attention = batch.attention
        tables = attention.tables
        reader, num_wanted = batch.prompt_reader, len(batch.last_token_index)
        return WholeStep(
            places=_packed(batch.places),
            query_lens=_packed(attention.query_lens),
            context_lens=_packed(attention.context_lens),
            tables=b"".join(tables),
            num_blocks=_packed([len(table) for table in tables]),
            num_wanted=None if num_wanted == attention.num_tokens else num_wanted,
            last_rows=_last_rows(batch.last_tokens),
            prompt_chunks=[] if reader is None else list(map(_indices, reader.chunks(self._vocab_size))),
            decodes=attention.decode_step is not None,
            adapters=b"" if batch.adapters is None else _packed(batch.adapters),
            states=b"" if batch.states is None else _packed((batch.states.read, batch.states.write)),
            images=batch.images,
        )


class StepReader:
    """Makes the batches of the messages, in their order, on a device."""

    def __init__(self, block_size: int, device: torch.device, ranks: Ranks) -> None:
        self._block_size = block_size
        self._device = device
        self._ranks = ranks
        self._series = DecodeSeries()
        # Of the last step, where a `NextStep` may follow.
        self._decoding: Batch | None = None

    def batch(self, message: WholeStep | NextStep) -> Batch:
        """Hears the token ids from rank 0."""
        batch = self._next(message) if isinstance(message, NextStep) else self._whole(message)
        self._decoding = batch if batch.attention.decode_step is not None else None
        return batch

    def _whole(self, message: WholeStep) -> Batch:
        step = None
        if message.decodes:
            self._series = DecodeSeries()
            step = DecodeStep(self._series, 0, *numpy.empty((3, 0), dtype=numpy.int64))
        attention = AttentionMetadata(
            query_lens=_unpacked(message.query_lens).tolist(),
            context_lens=_unpacked(message.context_lens).tolist(),
            block_tables=_split(message.tables, _unpacked(message.num_blocks).tolist()),
            block_size=self._block_size,
            device=self._device,
            decode_step=step,
        )
        token_ids, wanted = self._heard(attention.num_tokens, message.num_wanted)
        return Batch(
            token_ids,
            _unpacked(message.places).reshape(2, -1),
            attention,
            wanted,
            prompt_reader=FollowedPrompts((), message.prompt_chunks) if message.prompt_chunks else None,
            last_tokens=self._last_tokens(attention, message.last_rows),
            adapters=_unpacked(message.adapters) if message.adapters else None,
            images=message.images,
            states=self._state_slots(attention, message.states),
        )

    def _next(self, message: NextStep) -> Batch:
        last = self._decoding
        assert last is not None, "no step to follow"
        before = last.attention.decode_step
        assert before is not None
        places: Ints = last.places + 1
        rows, blocks = _unpacked(message.begun).reshape(2, -1)
        for row, block in zip(rows.tolist(), blocks.tolist(), strict=True):
            last.attention.tables[row].append(block)
        places[0, rows] = blocks * self._block_size
        # Of a prompt with images positions are less than what stands before them.
        context_lens: Ints = numpy.asarray(last.attention.context_lens) + 1
        columns = (context_lens[rows] - 1) // self._block_size
        attention = AttentionMetadata(
            query_lens=last.attention.query_lens,
            context_lens=context_lens.data,
            block_tables=last.attention.tables,
            block_size=self._block_size,
            device=self._device,
            decode_step=DecodeStep(self._series, before.number + 1, rows, columns, blocks),
        )
        token_ids, _ = self._heard(places.shape[1], None)
        return Batch(token_ids, places, attention, last.last_token_index, adapters=last.adapters, states=last.states)

    def _heard(self, num_tokens: int, num_wanted: int | None) -> tuple[Tensor, Tensor]:
        """The token ids, and whose logits are wanted."""
        room = torch.empty(num_tokens + (num_wanted or 0), dtype=torch.int64, device=self._device)
        heard = self._ranks.hear(room)
        wanted = torch.arange(num_tokens, device=self._device) if num_wanted is None else heard[num_tokens:]
        return heard[:num_tokens], wanted

    def _state_slots(self, attention: AttentionMetadata, slots: bytes) -> StateSlots | None:
        if not slots:
            return None
        read, write = _unpacked(slots).reshape(2, -1).tolist()
        return StateSlots(attention.query_lens, read, write, self._device)

    def _last_tokens(self, attention: AttentionMetadata, rows: LastRows | None) -> LastTokens | None:
        if rows is None:
            return None
        index, sampled = (to_device(each, self._device) for each in (rows.rows, rows.sampled))
        return LastTokens(index, replace(attention, query_lens=rows.query_lens), sampled)


@dataclass(frozen=True)
class FollowedPrompts(PromptReader):
    """Computes what rank 0 reads of prompts, and reads nothing."""

    chunks_there: Sequence[Ints]

    def read(self, logits_of: Callable[[Tensor], Tensor], vocab_size: int, device: torch.device) -> None:
        for chunk in self.chunks_there:
            logits_of(to_device(chunk, device))


def heard_with(batch: Batch) -> Tensor:
    """What rank 0 tells with a step's message: see `StepReader`."""
    if len(batch.last_token_index) == len(batch.token_ids):
        return batch.token_ids
    return torch.cat((batch.token_ids, batch.last_token_index))


def _last_rows(last: LastTokens | None) -> LastRows | None:
    # On a GPU there are none: this waits for nothing.
    return None if last is None else LastRows(last.index.numpy(), last.attention.query_lens, last.sampled.numpy())


def _packed(numbers: ArrayLike) -> bytes:
    return numpy.asarray(numbers, dtype=numpy.int32).tobytes()


def _unpacked(numbers: bytes) -> Ints:
    return numpy.frombuffer(numbers, dtype=numpy.int32).astype(numpy.int64)


def _split(tables: bytes, num_blocks: Sequence[int]) -> "list[array[int]]":
    held, width = memoryview(tables), array("i").itemsize
    ends = list(accumulate(num_blocks, initial=0))
    return [_table(held[width * start : width * end]) for start, end in pairwise(ends)]


def _table(blocks: memoryview) -> "array[int]":
    table = array("i")
    table.frombytes(blocks)
    return table


def _indices(places: Sequence[PromptPlace]) -> Ints:
    return numpy.array([place.batch_index for place in places])
