"""GGUF's blocks as numbers. Each type's layout is ggml's (ggml-quants.c), read with whole-tensor operations.

Blocks are [n, bytes of a block] uint8, weights [n, weights of a block] float32; of sizes in names d is a block's scale
and m its minimum, as ggml has them.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from .block_types import BlockType

_HALF = 2
_FLOAT_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# So many weights at a time: what is computed on the way stays small beside the tensor.
_CHUNK_WEIGHTS = 2**22
# What the four bits of the IQ4 types stand for.
_IQ4_VALUES = torch.tensor((-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)).float()


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
    return _halves(blocks[:, _HALF:]), _half(blocks, 0)


def q4_1(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Values [n, 32] uint8, scales and minima [n, 1] float16: a weight is value * scale - minimum."""
    return _halves(blocks[:, 2 * _HALF :]), _half(blocks, 0), -_half(blocks, _HALF)


def q4_k(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Values [n, 256] uint8, scales and minima [n, 8] float32, each of 32 weights; as `q4_1` has them."""
    return _fields(blocks[:, 16:], 4, 32), *_k_scales(blocks)


def _q4_0(blocks: Tensor) -> Tensor:
    values, scales = q4_0(blocks)
    return (values.float() - 8) * scales.float()


def _q4_1(blocks: Tensor) -> Tensor:
    values, scales, minima = q4_1(blocks)
    return _scaled(values.float(), scales.float(), minima.float())


def _q5_0(blocks: Tensor) -> Tensor:
    values = _halves(blocks[:, _HALF + 4 :]) | _fifth_bits(blocks[:, _HALF : _HALF + 4])
    return (values.float() - 16) * _half(blocks, 0).float()


def _q5_1(blocks: Tensor) -> Tensor:
    values = _halves(blocks[:, 2 * _HALF + 4 :]) | _fifth_bits(blocks[:, 2 * _HALF : 2 * _HALF + 4])
    return values.float() * _half(blocks, 0).float() + _half(blocks, _HALF).float()


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, _HALF:].view(torch.int8).float() * _half(blocks, 0).float()


def _q2_k(blocks: Tensor) -> Tensor:
    scales, values = blocks[:, :16], _fields(blocks[:, 16:80], 2, 32)
    d, m = _half(blocks, 80).float(), _half(blocks, 82).float()
    return _scaled(values.float(), d * (scales & 15).float(), m * (scales >> 4).float())


def _q3_k(blocks: Tensor) -> Tensor:
    # A bit that is missing stands for four less.
    high = _fields(blocks[:, :32], 1, 32)
    values = _fields(blocks[:, 32:96], 2, 32).float() - 4 * (1 - high.float())
    packed = blocks[:, 96:108]
    scales = _fields(packed[:, :8], 4, 8) | _fields(packed[:, 8:], 2, 4) << 4
    return _scaled(values, _half(blocks, 108).float() * (scales.float() - 32))


def _q4_k(blocks: Tensor) -> Tensor:
    values, scales, minima = q4_k(blocks)
    return _scaled(values.float(), scales, minima)


def _q5_k(blocks: Tensor) -> Tensor:
    values = _fields(blocks[:, 48:], 4, 32) | _fields(blocks[:, 16:48], 1, 32) << 4
    return _scaled(values.float(), *_k_scales(blocks))


def _q6_k(blocks: Tensor) -> Tensor:
    values = _fields(blocks[:, :128], 4, 64) | _fields(blocks[:, 128:192], 2, 32) << 4
    scales = blocks[:, 192:208].view(torch.int8).float()
    return _scaled(values.float() - 32, _half(blocks, 208).float() * scales)


def _iq4_nl(blocks: Tensor) -> Tensor:
    return _iq4_values(blocks[:, _HALF:]) * _half(blocks, 0).float()


def _iq4_xs(blocks: Tensor) -> Tensor:
    scales = _fields(blocks[:, 4:8], 4, 1) | _fields(blocks[:, 2:4], 2, 1) << 4
    return _scaled(_iq4_values(blocks[:, 8:]), _half(blocks, 0).float() * (scales.float() - 32))


_READERS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
}


def _half(blocks: Tensor, at: int) -> Tensor:
    """The float16 that begins at this byte: [n, 1]."""
    return blocks[:, at : at + _HALF].contiguous().view(torch.float16)


def _halves(packed: Tensor) -> Tensor:
    """Bytes whose low halves are the first values, whose high ones the others: [n, 2 * bytes]."""
    return torch.cat((packed & 15, packed >> 4), dim=1)


def _fifth_bits(packed: Tensor) -> Tensor:
    """32 bits, the lowest first, each as the fifth of a value: [n, 32]."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return ((packed.unsqueeze(-1) >> shifts & 1) << 4).flatten(1)


def _fields(packed: Tensor, bits: int, width: int) -> Tensor:
    """Runs of `width` bytes: the lowest `bits` of all of them, then the next, and so on: [n, bytes * 8 / bits]."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8).view(1, 1, -1, 1)
    runs = packed.reshape(len(packed), -1, 1, width)
    return (runs >> shifts & (1 << bits) - 1).flatten(1)


def _iq4_values(packed: Tensor) -> Tensor:
    """16 bytes have the values of 32 weights: [n, 2 * bytes] float32."""
    return _IQ4_VALUES[_fields(packed, 4, 16).int()]


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The eight scales and minima that Q4_K and Q5_K have in six bits each: [n, 8] float32."""
    low, middle, high = blocks[:, 4:16].reshape(len(blocks), 3, 4).unbind(1)
    scales = torch.cat((low & 63, (high & 15) | (low >> 2 & 48)), dim=1)
    minima = torch.cat((middle & 63, (high >> 4) | (middle >> 2 & 48)), dim=1)
    return _half(blocks, 0).float() * scales.float(), _half(blocks, _HALF).float() * minima.float()


def _scaled(values: Tensor, scales: Tensor, minima: Tensor | None = None) -> Tensor:
    """Neighbours share a scale, and a minimum that is taken off: [n, size]; of both [n, num_groups]."""
    groups = values.view(len(values), scales.shape[1], -1) * scales.unsqueeze(-1)
    return (groups if minima is None else groups - minima.unsqueeze(-1)).flatten(1)
