"""GGUF's types of one to three bits as numbers, in ggml's layouts: each names points of a grid, by their indices.

Blocks are [n, bytes of a block] uint8, weights [n, 256] float32. d, the scale of a block, is a float16.
"""

import torch
from torch import Tensor

from .fields import HALF, fields, half, scaled
from .grids import grid

# What IQ1's points are moved by, up or down.
_SHIFT = 0.125


def iq2_xxs(blocks: Tensor) -> Tensor:
    pairs = blocks[:, HALF:].reshape(len(blocks), 8, 8)
    scales, signs = _scales_and_signs(pairs[:, :, 4:].flatten(1))
    points = _points("IQ2_XXS", pairs[:, :, :4].flatten(1))
    return scaled(points * signs, half(blocks, 0).float() * scales * 0.25)


def iq2_xs(blocks: Tensor) -> Tensor:
    words = _words(blocks[:, 2:66])
    points = _points("IQ2_XS", words & 511) * _seven_signs(words >> 9)
    return scaled(points, _scales_of_2(blocks, 66))


def iq2_s(blocks: Tensor) -> Tensor:
    indices = blocks[:, 2:34].int() | fields(blocks[:, 66:74], 2, 1).int() << 8
    points = _points("IQ2_S", indices) * _signs(blocks[:, 34:66])
    return scaled(points, _scales_of_2(blocks, 74))


def iq3_xxs(blocks: Tensor) -> Tensor:
    scales, signs = _scales_and_signs(blocks[:, 66:98])
    points = _points("IQ3_XXS", blocks[:, 2:66])
    return scaled(points * signs, half(blocks, 0).float() * scales * 0.5)


def iq3_s(blocks: Tensor) -> Tensor:
    indices = blocks[:, 2:66].int() | fields(blocks[:, 66:74], 1, 1).int() << 8
    points = _points("IQ3_S", indices) * _signs(blocks[:, 74:106])
    return scaled(points, _odd_scales(half(blocks, 0), fields(blocks[:, 106:110], 4, 1)))


def iq1_s(blocks: Tensor) -> Tensor:
    words = _words(blocks[:, 34:50])
    highest = words.unsqueeze(-1) >> torch.arange(0, 12, 3) & 7
    points = _points("IQ1_S", blocks[:, 2:34].int() | highest.flatten(1) << 8)
    shifts = _shifts(words >> 15).unsqueeze(-1)
    points = points.view(len(blocks), 8, 32) + shifts
    return scaled(points.flatten(1), _odd_scales(half(blocks, 0), words >> 12 & 7))


def iq1_m(blocks: Tensor) -> Tensor:
    highest, words = fields(blocks[:, 32:48], 4, 1).int(), _words(blocks[:, 48:56])
    points = _points("IQ1_S", blocks[:, :32].int() | (highest & 7) << 8)
    points = points.view(len(blocks), 32, 8) + _shifts(highest >> 3).unsqueeze(-1)
    scales = words.unsqueeze(-1) >> torch.arange(0, 12, 3) & 7
    # The four highest bits of each word are four bits of d.
    d = ((words >> 12) << torch.arange(0, 16, 4)).sum(1, keepdim=True).to(torch.uint16).view(torch.float16)
    return scaled(points.flatten(1), _odd_scales(d, scales.flatten(1)))


def _points(kind: str, indices: Tensor) -> Tensor:
    """The points of so many indices, one after the other: [n, 256]."""
    return grid(kind)[indices.int()].flatten(1)


def _scales_and_signs(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Words of 32 bits: four times the signs of eight weights, then a scale. [n, words] and [n, 32 * words]."""
    words = packed.contiguous().view(torch.int32)
    signs = words.unsqueeze(-1) >> torch.arange(0, 28, 7, dtype=torch.int32)
    return (words >> 28 & 15).float() + 0.5, _seven_signs(signs.flatten(1))


def _seven_signs(packed: Tensor) -> Tensor:
    """The signs of eight weights in seven bits: of the minus signs there is an even number. [n, 8 * size]."""
    bits = packed.unsqueeze(-1) >> torch.arange(7, dtype=torch.int32) & 1
    return _of_bits(torch.cat((bits, bits.sum(-1, keepdim=True) & 1), dim=-1))


def _signs(packed: Tensor) -> Tensor:
    """A sign a bit, the lowest first: [n, 8 * bytes]."""
    return _of_bits(fields(packed, 1, 1))


def _of_bits(bits: Tensor) -> Tensor:
    return (1 - 2 * bits.float()).flatten(1)


def _shifts(bits: Tensor) -> Tensor:
    return _SHIFT * (1 - 2 * bits.float())


def _scales_of_2(blocks: Tensor, at: int) -> Tensor:
    """Those of IQ2_XS and IQ2_S, of four bits each, in the eight bytes from `at` on: [n, 16]."""
    return half(blocks, 0).float() * (fields(blocks[:, at : at + 8], 4, 1).float() + 0.5) * 0.25


def _odd_scales(d: Tensor, values: Tensor) -> Tensor:
    return d.float() * (2 * values.float() + 1)


def _words(packed: Tensor) -> Tensor:
    """Numbers of 16 bits: [n, bytes / 2] int32."""
    return packed.contiguous().view(torch.int16).int() & 0xFFFF
