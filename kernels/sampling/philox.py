"""Philox4x32-10, the counter-based generator: a number depends on its seed and counter and on nothing else.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011. The same construction as
`triton.language.rand`, so that a GPU kernel can draw the same numbers.
"""

import torch
from torch import Tensor

from ..device import runs_triton

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def philox_uniform(seeds: Tensor, counters: Tensor) -> Tensor:
    """Uniform numbers in (0, 1), one for each pair of seed and counter.

    seeds, counters: [n] int64, not negative. Returns [n] float64 with 32 random bits each.
    """
    if runs_triton(seeds):
        from .triton import philox_uniform_triton

        return philox_uniform_triton(seeds, counters)
    zeros = torch.zeros_like(counters)
    words = philox_4x32(
        (counters & _MASK, counters >> 32, zeros, zeros),
        (seeds & _MASK, seeds >> 32),
    )
    return (words[0].double() + 0.5) / 2.0**32


def philox_4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four random 32-bit words for a counter of four and a key of two; each a word in an int64, lowest first."""
    c0, c1, c2, c3 = counter
    key0, key1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ key0, low1, high0 ^ c3 ^ key1, low0
        key0, key1 = (key0 + _WEYL[0]) & _MASK, (key1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def _multiply(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a 32 × 32 bit product, by halves: int64 has a sign bit to stay clear of."""
    low_product = (a & 0xFFFF) * b
    high_product = (a >> 16) * b + (low_product >> 16)
    return high_product >> 16, ((high_product << 16) | (low_product & 0xFFFF)) & _MASK
