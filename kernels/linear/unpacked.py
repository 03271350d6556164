"""Products of many rows with weights in four bits: the weight unpacked into memory that is given back, then torch's."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import linear

from ..device import is_hopper
from .weights import HALF_TILE, Fp4Weight, Int4Weight

# The most rows that the kernel multiplies while it has a weight in registers: of more it would unpack each twice.
_FUSED_ROWS, _FUSED_ROWS_ON_HOPPER = 128, 256
# Of larger weights some outputs are unpacked at a time, multiplied by, and overwritten with the next.
MAX_BYTES = 128 * 2**20
# Outputs come in such numbers, so that torch's product has whole tiles.
_OUTPUTS_TOGETHER = 256


def min_unpacked_rows(weight: Int4Weight | Fp4Weight, dtype: torch.dtype) -> int:
    """From how many rows of this type on to unpack a weight first."""
    # NVFP4's takes three times as many instructions.
    is_slow = isinstance(weight, Fp4Weight) and weight.group_size < HALF_TILE
    has_many = is_hopper(weight.packed.device) and dtype != torch.float32 and not is_slow
    return (_FUSED_ROWS_ON_HOPPER if has_many else _FUSED_ROWS) + 1


def int4_linear_unpacked(x: Tensor, weight: Int4Weight | Fp4Weight, bias: Tensor | None = None) -> Tensor:
    """See `int4_linear_reference`; x has its inputs at the weight's places already: an order is not applied."""
    from .triton import check_int4, unpack_int4_triton

    check_int4(x, weight, bias)
    bias = None if bias is None else bias.to(x.dtype)
    parts = list(_parts(weight, x.dtype))
    if len(parts) == 1:
        return linear(x, unpack_int4_triton(weight, parts[0], x.dtype).t(), bias)
    output = torch.empty(len(x), weight.num_outputs, dtype=x.dtype, device=x.device)
    for part in parts:
        columns = slice(part.start, part.stop)
        # Freed as soon as the product is under way: the next one gets the same memory.
        _multiply(
            output[:, columns], x, unpack_int4_triton(weight, part, x.dtype), None if bias is None else bias[columns]
        )
    return output


def _multiply(output: Tensor, x: Tensor, unpacked: Tensor, bias: Tensor | None) -> None:
    if bias is None:
        torch.mm(x, unpacked, out=output)
    else:
        torch.addmm(bias, x, unpacked, out=output)


def unpacked_bytes(weight: Int4Weight | Fp4Weight, dtype: torch.dtype) -> int:
    """The memory that `int4_linear_unpacked` takes beside what it returns."""
    return max(len(part) for part in _parts(weight, dtype)) * weight.num_inputs * dtype.itemsize


def _parts(weight: Int4Weight | Fp4Weight, dtype: torch.dtype) -> Iterator[range]:
    """The outputs that are unpacked at a time, about as many each time."""
    num_outputs, bytes_each = weight.num_outputs, weight.num_inputs * dtype.itemsize
    num_parts = -(-num_outputs * bytes_each // MAX_BYTES)
    step = -(-num_outputs // num_parts // _OUTPUTS_TOGETHER) * _OUTPUTS_TOGETHER
    for start in range(0, num_outputs, step):
        yield range(start, min(start + step, num_outputs))
