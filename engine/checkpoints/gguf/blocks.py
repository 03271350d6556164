"""GGUF's blocks as numbers. Each type's layout is ggml's (ggml-quants.c), read with whole-tensor operations.

Blocks are [n, bytes of a block] uint8, weights [n, weights of a block] float32; of sizes in names d is a block's scale
and m its minimum, as ggml has them.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from . import grid_blocks
from .block_types import BlockType
from .fields import HALF, fields, half, halves, scaled

_FLOAT_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# So many weights at a time: what is computed on the way stays small beside the tensor.
_CHUNK_WEIGHTS = 2**22
# What the four bits of the IQ4 types stand for.
_IQ4_VALUES = torch.tensor((-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)).float()
# What those of MXFP4 do: floats of two bits of exponent and one of mantissa, doubled.
_FP4_VALUES = torch.tensor((0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)).float()


def dequantized(rows: Tensor, kind: BlockType, dtype: torch.dtype) -> Tensor:
    """Rows as the file has them, [n, row_bytes] uint8, as [n, size] of `dtype`: computed in float32, rounded once."""
    if kind.name in _FLOAT_DTYPES:
        return rows.view(_FLOAT_DTYPES[kind.name]).to(dtype)
    size = rows.shape[1] // kind.num_bytes * kind.num_weights
    result = torch.empty(len(rows), size, dtype=dtype)
    step = max(1, _CHUNK_WEIGHTS // size)
    for begin in range(0, len(rows), step):
        blocks = rows[begin : begin + step].reshape(-1, kind.num_bytes)
        result[begin : begin + step] = _READERS[kind.name](blocks).view(-1, size)
    return result


def q4_0(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Values [n, 32] uint8 and scales [n, 1] float16: a weight is (value - 8) * scale."""
    return halves(blocks[:, HALF:]), half(blocks, 0)


def q4_1(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Values [n, 32] uint8, scales and minima [n, 1] float16: a weight is value * scale - minimum."""
    return halves(blocks[:, 2 * HALF :]), half(blocks, 0), -half(blocks, HALF)


def q4_k(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Values [n, 256] uint8, scales and minima [n, 8] float32, each of 32 weights; as `q4_1` has them."""
    return fields(blocks[:, 16:], 4, 32), *_k_scales(blocks)


def q5_0(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Values [n, 32] int8, scales [n, 1] float32: a weight is value * scale."""
    values = halves(blocks[:, HALF + 4 :]) | _fifth_bits(blocks[:, HALF : HALF + 4])
    return values.view(torch.int8) - 16, half(blocks, 0).float()


def q8_0(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """As `q5_0`."""
    return blocks[:, HALF:].view(torch.int8), half(blocks, 0).float()


def q6_k(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Values [n, 256] int8, scales [n, 16] float32, each of 16 weights."""
    values = fields(blocks[:, :128], 4, 64) | fields(blocks[:, 128:192], 2, 32) << 4
    return values.view(torch.int8) - 32, half(blocks, 208).float() * blocks[:, 192:208].view(torch.int8).float()


def _q4_0(blocks: Tensor) -> Tensor:
    values, scales = q4_0(blocks)
    return (values.float() - 8) * scales.float()


def _q4_1(blocks: Tensor) -> Tensor:
    values, scales, minima = q4_1(blocks)
    return scaled(values.float(), scales.float(), minima.float())


def _symmetric(unpacked: tuple[Tensor, Tensor]) -> Tensor:
    values, scales = unpacked
    return scaled(values.float(), scales)


def _q5_1(blocks: Tensor) -> Tensor:
    values = halves(blocks[:, 2 * HALF + 4 :]) | _fifth_bits(blocks[:, 2 * HALF : 2 * HALF + 4])
    return values.float() * half(blocks, 0).float() + half(blocks, HALF).float()


def _q2_k(blocks: Tensor) -> Tensor:
    scales, values = blocks[:, :16], fields(blocks[:, 16:80], 2, 32)
    d, m = half(blocks, 80).float(), half(blocks, 82).float()
    return scaled(values.float(), d * (scales & 15).float(), m * (scales >> 4).float())


def _q3_k(blocks: Tensor) -> Tensor:
    # A bit that is missing stands for four less.
    high = fields(blocks[:, :32], 1, 32)
    values = fields(blocks[:, 32:96], 2, 32).float() - 4 * (1 - high.float())
    packed = blocks[:, 96:108]
    scales = fields(packed[:, :8], 4, 8) | fields(packed[:, 8:], 2, 4) << 4
    return scaled(values, half(blocks, 108).float() * (scales.float() - 32))


def _q4_k(blocks: Tensor) -> Tensor:
    values, scales, minima = q4_k(blocks)
    return scaled(values.float(), scales, minima)


def _q5_k(blocks: Tensor) -> Tensor:
    values = fields(blocks[:, 48:], 4, 32) | fields(blocks[:, 16:48], 1, 32) << 4
    return scaled(values.float(), *_k_scales(blocks))


def _iq4_nl(blocks: Tensor) -> Tensor:
    return _IQ4_VALUES[halves(blocks[:, HALF:]).int()] * half(blocks, 0).float()


def _iq4_xs(blocks: Tensor) -> Tensor:
    scales = fields(blocks[:, 4:8], 4, 1) | fields(blocks[:, 2:4], 2, 1) << 4
    values = _IQ4_VALUES[fields(blocks[:, 8:], 4, 16).int()]
    return scaled(values, half(blocks, 0).float() * (scales.float() - 32))


def _mxfp4(blocks: Tensor) -> Tensor:
    # The scale is a power of two; in float64, as the smallest has less than float32's exponents.
    scales = torch.exp2(blocks[:, :1].double() - 128).float()
    return _FP4_VALUES[halves(blocks[:, 1:]).int()] * scales


def _tq1_0(blocks: Tensor) -> Tensor:
    """Five digits of base three a byte, in the last four bytes four: times 3ⁿ, a byte has the nth in front."""
    parts = (_digits(blocks[:, :32], 5), _digits(blocks[:, 32:48], 5), _digits(blocks[:, 48:52], 4))
    return (torch.cat(parts, dim=1).float() - 1) * half(blocks, 52).float()


def _tq2_0(blocks: Tensor) -> Tensor:
    return (fields(blocks[:, :64], 2, 32).float() - 1) * half(blocks, 64).float()


_READERS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": lambda blocks: _symmetric(q5_0(blocks)),
    "Q5_1": _q5_1,
    "Q8_0": lambda blocks: _symmetric(q8_0(blocks)),
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": lambda blocks: _symmetric(q6_k(blocks)),
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
    "TQ1_0": _tq1_0,
    "TQ2_0": _tq2_0,
    "IQ1_S": grid_blocks.iq1_s,
    "IQ1_M": grid_blocks.iq1_m,
    "IQ2_XXS": grid_blocks.iq2_xxs,
    "IQ2_XS": grid_blocks.iq2_xs,
    "IQ2_S": grid_blocks.iq2_s,
    "IQ3_XXS": grid_blocks.iq3_xxs,
    "IQ3_S": grid_blocks.iq3_s,
}


def _fifth_bits(packed: Tensor) -> Tensor:
    """32 bits, the lowest first, each as the fifth of a value: [n, 32]."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return ((packed.unsqueeze(-1) >> shifts & 1) << 4).flatten(1)


def _digits(packed: Tensor, number: int) -> Tensor:
    """The first of all bytes, then the second, and so on: [n, number * bytes] of 0, 1 and 2."""
    powers = 3 ** torch.arange(number, dtype=torch.int32).view(1, -1, 1)
    return ((packed.unsqueeze(1) * powers & 255) * 3 >> 8).flatten(1)


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The eight scales and minima that Q4_K and Q5_K have in six bits each: [n, 8] float32."""
    low, middle, high = blocks[:, 4:16].reshape(len(blocks), 3, 4).unbind(1)
    scales = torch.cat((low & 63, (high & 15) | (low >> 2 & 48)), dim=1)
    minima = torch.cat((middle & 63, (high >> 4) | (middle >> 2 & 48)), dim=1)
    return half(blocks, 0).float() * scales.float(), half(blocks, HALF).float() * minima.float()
