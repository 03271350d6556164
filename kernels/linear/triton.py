"""Products with quantised weights on the GPU: checks, and launches."""

import torch
import triton
from torch import Tensor

from ..device import num_processors
from ..triton_checks import FLOAT_DTYPES, check_launch, check_tensor
from .triton_kernels import int4_linear_kernel, quantize_rows_kernel, scaled_linear_kernel, sum_splits_kernel
from .weights import HALF_TILE, KERNEL_GROUP_SIZE, Int4Weight, ScaledWeight

# A group is one program's registers.
MAX_GROUP_SIZE = 65536
_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
_BYTE_DTYPES = tuple(_LARGEST)
_NUMBERS_PER_PROGRAM = 1024
# With more rows than this the tiles are enough to fill a GPU.
_MAX_SPLIT_ROWS = 64
# A split takes at least so many tiles of inputs: fewer would be mostly start and end.
_MIN_TILES_PER_SPLIT = 4
_PROGRAMS_PER_PROCESSOR = 2


def quantize_rows_triton(x: Tensor, dtype: torch.dtype, group_size: int) -> tuple[Tensor, Tensor]:
    """See `quantize_rows_reference`."""
    check_launch("x", x, quantize_rows_kernel)
    check_tensor("x", x, (None, None), FLOAT_DTYPES, x.device, is_contiguous=False)
    num_rows, num_inputs = x.shape
    if dtype not in _LARGEST:
        raise ValueError(f"dtype must be int8 or float8_e4m3fn, not {str(dtype).removeprefix('torch.')}")
    if not 1 <= min(group_size, num_inputs) <= MAX_GROUP_SIZE:
        raise ValueError(f"group_size {group_size} for x {tuple(x.shape)} must be between 1 and {MAX_GROUP_SIZE}")
    group_size = min(group_size, num_inputs)
    num_groups = triton.cdiv(num_inputs, group_size)
    values = torch.empty(num_rows, num_inputs, dtype=dtype, device=x.device)
    scales = torch.empty(num_rows, num_groups, dtype=torch.float32, device=x.device)
    if num_rows:
        padded = triton.next_power_of_2(group_size)
        quantize_rows_kernel[(num_rows, num_groups)](
            values,
            scales,
            x,
            num_inputs,
            group_size,
            num_groups,
            x.stride(0),
            LARGEST=_LARGEST[dtype],
            IS_INT=dtype == torch.int8,
            PADDED_SIZE=padded,
            num_warps=min(max(padded // 512, 1), 16),
        )
    return values, scales


def scaled_linear_triton(
    values: Tensor, scales: Tensor, weight: ScaledWeight, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """See `scaled_linear_reference`; sums of products are int32, or float32 as the tensor cores have them."""
    num_outputs, num_inputs = _check_scaled(values, scales, weight, bias, dtype)
    num_rows = len(values)
    output = torch.empty(num_rows, num_outputs, dtype=dtype, device=values.device)
    if not output.numel():
        return output
    rows = min(max(triton.next_power_of_2(num_rows), 16), 128)
    # Few rows are the weight's bytes: narrow tiles share them among more processors.
    outputs = 128 if rows > 32 else 32
    num_tiles = triton.cdiv(num_rows, rows) * triton.cdiv(num_outputs, outputs)
    grid = (min(num_tiles, _PROGRAMS_PER_PROCESSOR * num_processors(values.device)),)
    scaled_linear_kernel[grid](
        output,
        values,
        scales,
        weight.values,
        weight.scales,
        weight.scales if bias is None else bias,
        num_rows,
        num_outputs,
        num_inputs,
        weight.num_groups,
        HAS_BIAS=bias is not None,
        IS_GROUPED=weight.num_groups > 1,
        IS_INT=values.dtype == torch.int8,
        ROWS=rows,
        OUTPUTS=outputs,
        INPUTS=KERNEL_GROUP_SIZE,
        num_warps=8 if rows == 128 else 4,
        num_stages=3,
    )
    return output


def int4_linear_triton(
    x: Tensor, weight: Int4Weight, bias: Tensor | None = None, num_splits: int | None = None
) -> Tensor:
    """See `int4_linear_reference`; x has its inputs at the weight's places already: `weight.order` is not applied.

    num_splits: among how many programs a tile's inputs are shared, by default what fills the GPU.
    """
    _check_int4(x, weight, bias)
    num_rows, num_outputs = len(x), weight.num_outputs
    output = torch.empty(num_rows, num_outputs, dtype=x.dtype, device=x.device)
    if not output.numel():
        return output
    # Without tensor cores a tile of more rows does not fit into the registers.
    rows = min(max(triton.next_power_of_2(num_rows), 16), 32 if x.dtype == torch.float32 else 128)
    outputs = 128 if rows > 32 else 64
    grid = (triton.cdiv(num_rows, rows), triton.cdiv(num_outputs, outputs))
    num_tiles = triton.cdiv(weight.num_inputs, 2 * HALF_TILE)
    wanted = num_splits or _wanted_splits(num_rows, grid[0] * grid[1], num_tiles, x.device)
    tiles_per_split = triton.cdiv(num_tiles, wanted)
    splits = triton.cdiv(num_tiles, tiles_per_split)
    parts = output if splits == 1 else torch.empty(splits, *output.shape, dtype=torch.float32, device=x.device)
    int4_linear_kernel[(*grid, splits)](
        parts,
        x,
        weight.packed,
        weight.scales,
        weight.zeros,
        x if bias is None else bias,
        num_rows,
        num_outputs,
        weight.num_inputs,
        tiles_per_split,
        weight.group_size,
        len(weight.scales),
        x.stride(0),
        HAS_BIAS=bias is not None and splits == 1,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        ROWS=rows,
        OUTPUTS=outputs,
        HALF_TILE=HALF_TILE,
        num_warps=8 if rows == 128 else 4,
        num_stages=4,
    )
    if splits > 1:
        _sum_splits(output, parts, bias)
    return output


def _sum_splits(output: Tensor, parts: Tensor, bias: Tensor | None) -> None:
    grid = (triton.cdiv(output.numel(), _NUMBERS_PER_PROGRAM),)
    sum_splits_kernel[grid](
        output,
        parts,
        parts if bias is None else bias,
        output.numel(),
        output.shape[1],
        len(parts),
        HAS_BIAS=bias is not None,
        NUMBERS=_NUMBERS_PER_PROGRAM,
    )


def _wanted_splits(num_rows: int, num_programs: int, num_tiles: int, device: torch.device) -> int:
    if num_rows > _MAX_SPLIT_ROWS:
        return 1
    to_fill = _PROGRAMS_PER_PROCESSOR * num_processors(device) // num_programs
    return max(1, min(to_fill, num_tiles // _MIN_TILES_PER_SPLIT))


def _check_scaled(
    values: Tensor, scales: Tensor, weight: ScaledWeight, bias: Tensor | None, dtype: torch.dtype
) -> tuple[int, int]:
    """The weight's shape, when all fits together."""
    check_launch("values", values, scaled_linear_kernel)
    device = values.device
    check_tensor("weight.values", weight.values, (None, None), _BYTE_DTYPES, device)
    num_outputs, num_inputs = weight.values.shape
    check_tensor("values", values, (None, num_inputs), (weight.values.dtype,), device)
    num_groups = triton.cdiv(num_inputs, weight.group_size)
    if num_groups > 1 and weight.group_size != KERNEL_GROUP_SIZE:
        raise ValueError(
            f"weight.group_size {weight.group_size} must be {KERNEL_GROUP_SIZE}, or {num_inputs}, all inputs"
        )
    check_tensor("weight.scales", weight.scales, (num_groups, num_outputs), (torch.float32,), device)
    check_tensor("scales", scales, (len(values), num_groups), (torch.float32,), device)
    if dtype not in FLOAT_DTYPES:
        raise ValueError(f"dtype must be float32, float16 or bfloat16, not {str(dtype).removeprefix('torch.')}")
    if bias is not None:
        check_tensor("bias", bias, (num_outputs,), FLOAT_DTYPES, device)
    return num_outputs, num_inputs


def _check_int4(x: Tensor, weight: Int4Weight, bias: Tensor | None) -> None:
    check_launch("x", x, int4_linear_kernel)
    check_tensor("x", x, (None, weight.num_inputs), FLOAT_DTYPES, x.device, is_contiguous=False)
    num_bytes = triton.cdiv(weight.num_inputs, 2 * HALF_TILE) * HALF_TILE
    check_tensor("weight.packed", weight.packed, (num_bytes, None), (torch.uint8,), x.device)
    num_groups = triton.cdiv(weight.num_inputs, weight.group_size)
    check_tensor("weight.scales", weight.scales, (num_groups, weight.num_outputs), FLOAT_DTYPES, x.device)
    check_tensor("weight.zeros", weight.zeros, weight.scales.shape, (torch.uint8,), x.device)
    if bias is not None:
        check_tensor("bias", bias, (weight.num_outputs,), FLOAT_DTYPES, x.device)
