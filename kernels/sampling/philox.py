"""Philox4x32-10, the counter-based generator: a number depends on its seed and counter and on nothing else.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011. The same construction as
`triton.language.rand`, so that a GPU kernel can draw the same numbers.
"""

from typing import TypeAlias

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..device import runs_triton

# 32-bit words, each in 64 bits.
Words: TypeAlias = NDArray[numpy.uint64]

_MASK, _HALF = numpy.uint64(0xFFFFFFFF), numpy.uint64(32)
_MULTIPLIERS = (numpy.uint64(0xD2511F53), numpy.uint64(0xCD9E8D57))
_WEYL = (numpy.uint64(0x9E3779B9), numpy.uint64(0xBB67AE85))
_ROUNDS = 10


def philox_uniform(seeds: Tensor, counters: Tensor) -> Tensor:
    """Uniform numbers in (0, 1), one for each pair of seed and counter.

    seeds, counters: [n] int64, not negative. Returns [n] float64 with 32 random bits each.
    """
    if runs_triton(seeds):
        from .triton import philox_uniform_triton

        return philox_uniform_triton(seeds, counters)
    # In NumPy, which has the unsigned product whole and takes less time over an operation on a few numbers.
    counter, seed = (words.cpu().numpy().astype(numpy.uint64) for words in (counters, seeds))
    zeros = numpy.zeros_like(counter)
    words = philox_4x32((counter & _MASK, counter >> _HALF, zeros, zeros), (seed & _MASK, seed >> _HALF))
    return torch.from_numpy((words[0] + 0.5) / 2.0**32).to(seeds.device)


def philox_4x32(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, ...]:
    """Four random 32-bit words for a counter of four and a key of two, lowest first."""
    c0, c1, c2, c3 = counter
    key0, key1 = key
    for _ in range(_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = (product1 >> _HALF) ^ c1 ^ key0, product1 & _MASK
        c2, c3 = (product0 >> _HALF) ^ c3 ^ key1, product0 & _MASK
        key0, key1 = (key0 + _WEYL[0]) & _MASK, (key1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3
