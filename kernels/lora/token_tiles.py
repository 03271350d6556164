"""Which tokens of a step have which adapter, as the kernels read it: tiles of tokens that have the same."""

from dataclasses import dataclass

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..upload import upload

Ints = NDArray[numpy.int32]

# Steps of up to so many tokens are mostly decodes of many adapters: a tile is what a product takes at least.
_FEW_TOKENS = 256
FEW_ROWS, _MANY_ROWS = 16, 64
_TILE_SIZE = 3
# Kernels like an aligned beginning: of the tiles, and of the tokens.
_ALIGNED = 4


@dataclass(frozen=True)
class TokenTiles:
    """For steps of up to `num_tokens` tokens with adapters in up to `num_slots` slots.

    memory: [num_ints(...)] int32, on the device: how many tiles there are; the tiles, each a slot, its first token's
    place among the tokens and how many it has; and the tokens, those of a slot after each other.
    """

    num_tokens: int
    num_slots: int
    memory: Tensor

    @classmethod
    def of(cls, slots: NDArray[numpy.int64], num_slots: int, device: torch.device) -> "TokenTiles":
        """slots: [num_tokens], each token's, or a negative number where it has no adapter."""
        tiles = cls.blank(len(slots), num_slots, device)
        tiles.load(slots)
        return tiles

    @classmethod
    def blank(cls, num_tokens: int, num_slots: int, device: torch.device) -> "TokenTiles":
        """Without any; to be filled by `load`."""
        return cls(
            num_tokens, num_slots, torch.zeros(num_ints(num_tokens, num_slots), dtype=torch.int32, device=device)
        )

    def load(self, slots: NDArray[numpy.int64]) -> None:
        """Put in a step's, of no more tokens, without waiting for the device."""
        upload(torch.from_numpy(pack_tiles(slots, self.num_tokens, self.num_slots)), self.memory)

    @property
    def rows(self) -> int:
        """Of a tile."""
        return tile_rows(self.num_tokens)

    @property
    def max_tiles(self) -> int:
        return _max_tiles(self.num_tokens, self.num_slots)

    @property
    def num_tiles(self) -> Tensor:
        """[1] int32."""
        return self.memory[:1]

    @property
    def tiles(self) -> Tensor:
        """[max_tiles * 3] int32, the first `num_tiles` times three of which there are."""
        return self.memory[_ALIGNED : _ALIGNED + _TILE_SIZE * self.max_tiles]

    @property
    def tokens(self) -> Tensor:
        """[num_tokens] int32."""
        return self.memory[_tokens_begin(self.num_tokens, self.num_slots) :]


def tile_rows(num_tokens: int) -> int:
    return FEW_ROWS if num_tokens <= _FEW_TOKENS else _MANY_ROWS


def num_ints(num_tokens: int, num_slots: int) -> int:
    return _tokens_begin(num_tokens, num_slots) + num_tokens


def pack_tiles(slots: NDArray[numpy.int64], num_tokens: int, num_slots: int) -> Ints:
    """The content of a `TokenTiles` of these sizes."""
    packed = numpy.zeros(num_ints(num_tokens, num_slots), dtype=numpy.int32)
    order = slots.argsort(kind="stable")
    order = order[(slots < 0).sum() :]
    counts = numpy.bincount(slots[order], minlength=num_slots)
    rows = tile_rows(num_tokens)
    per_slot = -(-counts // rows)
    slot = numpy.arange(num_slots).repeat(per_slot)
    nth = numpy.arange(len(slot)) - (per_slot.cumsum() - per_slot).repeat(per_slot)
    first = (counts.cumsum() - counts)[slot] + nth * rows
    packed[0] = len(slot)
    tiles = packed[_ALIGNED : _ALIGNED + _TILE_SIZE * len(slot)].reshape(-1, _TILE_SIZE)
    tiles[:, 0], tiles[:, 1], tiles[:, 2] = slot, first, numpy.minimum(counts[slot] - nth * rows, rows)
    begin = _tokens_begin(num_tokens, num_slots)
    packed[begin : begin + len(order)] = order
    return packed


def _max_tiles(num_tokens: int, num_slots: int) -> int:
    return min(num_tokens, num_tokens // tile_rows(num_tokens) + num_slots)


def _tokens_begin(num_tokens: int, num_slots: int) -> int:
    return _ALIGNED + -(-_TILE_SIZE * _max_tiles(num_tokens, num_slots) // _ALIGNED) * _ALIGNED
