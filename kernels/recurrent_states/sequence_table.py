"""A batch's sequences as the kernels of a GPU read them: who has which tokens and which states."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..upload import upload

Ints = NDArray[numpy.int32]

# Sequences of up to so many go token by token: their states' way to the processor and back is what takes time.
FEW_TOKENS = 16
# Longer ones go by chunks, whose tokens are taken together.
CHUNK = 64
_SEQUENCE_SIZE, _TILE_SIZE = 4, 2


@dataclass(frozen=True)
class SequenceTable:
    """How many sequences there are, of which the first `num_few` have few tokens, and how many tiles and chunks.

    memory: int32 on the device, the sequences, the tiles and the chunks. Launches depend on nothing else, so that a
    CUDA graph may be replayed once `load` has put in another step.
    """

    num_sequences: int
    num_few: int
    num_tiles: int
    num_chunks: int
    tile_tokens: int
    memory: Tensor

    @classmethod
    def of(
        cls, query_lens: Sequence[int], read: Sequence[int], write: Sequence[int], device: torch.device
    ) -> "SequenceTable":
        lengths = numpy.array(query_lens, dtype=numpy.int32)
        is_few = lengths <= FEW_TOKENS
        tile_tokens = FEW_TOKENS if (lengths > 1).any() else 1
        num_tiles, num_chunks = len(_tiles(lengths, tile_tokens)), len(_tiles(lengths[~is_few], CHUNK))
        num_ints = _SEQUENCE_SIZE * len(lengths) + _TILE_SIZE * (num_tiles + num_chunks)
        memory = torch.empty(num_ints, dtype=torch.int32, device=device)
        table = cls(len(lengths), int(is_few.sum()), num_tiles, num_chunks, tile_tokens, memory)
        table.load(query_lens, read, write)
        return table

    def load(self, query_lens: Sequence[int], read: Sequence[int], write: Sequence[int]) -> None:
        """Put in a step's, of as many sequences, few ones, tiles and chunks, without waiting for the device.

        What a graph of decodes has too many is padding: sequences without tokens, of which neither slot is looked at.
        """
        packed = _pack(numpy.array([query_lens, read, write], dtype=numpy.int32), self.tile_tokens)
        assert packed.size == self.memory.numel(), "a table is for as many sequences and tiles as it was made for"
        upload(torch.from_numpy(packed), self.memory)

    @property
    def sequences(self) -> Tensor:
        """[num_sequences, 4] int32: the first token, how many there are, the slot read and the one written."""
        return self.memory[: _SEQUENCE_SIZE * self.num_sequences].view(-1, _SEQUENCE_SIZE)

    @property
    def tiles(self) -> Tensor:
        """[num_tiles, 2] int32: a sequence, and which of its tokens is the tile's first. Every sequence has a tile."""
        return self._pairs[: self.num_tiles]

    @property
    def chunks(self) -> Tensor:
        """[num_chunks, 2] int32, likewise of those sequences that have not few tokens."""
        return self._pairs[self.num_tiles :]

    @property
    def _pairs(self) -> Tensor:
        return self.memory[_SEQUENCE_SIZE * self.num_sequences :].view(-1, _TILE_SIZE)


def _pack(given: Ints, tile_tokens: int) -> Ints:
    """given: lengths, slots to read and slots to write."""
    lengths, read, write = given
    few, many = numpy.flatnonzero(lengths <= FEW_TOKENS), numpy.flatnonzero(lengths > FEW_TOKENS)
    # The longest begin first: the others are done beside them.
    order = numpy.concatenate((few, many[(-lengths[many]).argsort(kind="stable")]))
    sequences = numpy.stack((lengths.cumsum() - lengths, lengths, read, write), axis=1)[order]
    tiles, chunks = _tiles(lengths[order], tile_tokens), _tiles(lengths[order[len(few) :]], CHUNK)
    chunks[:, 0] += len(few)
    return numpy.concatenate((sequences.ravel(), tiles.ravel(), chunks.ravel())).astype(numpy.int32)


def _tiles(lengths: Ints, tile_tokens: int) -> NDArray[numpy.int64]:
    """[num_tiles, 2], each a sequence's index and its token that is the tile's first: one tile a sequence at least."""
    num_tiles = numpy.maximum(-(-lengths // tile_tokens), 1)
    owner = numpy.arange(len(lengths)).repeat(num_tiles)
    nth = numpy.arange(len(owner)) - (num_tiles.cumsum() - num_tiles).repeat(num_tiles)
    return numpy.stack((owner, nth * tile_tokens), axis=1)
