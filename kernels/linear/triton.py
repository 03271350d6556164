"""Products with quantised weights on the GPU: checks, and launches."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..device import is_hopper, multiplies_asynchronously, num_processors, shared_bytes
from ..launch_sizes import cdiv, next_power_of_2
from ..triton_checks import FLOAT_DTYPES, check_launch, check_tensor
from ..triton_early_launch import early_launch
from .gates import Gate
from .rows import LARGEST
from .triton_kernels import (
    int4_linear_kernel,
    quantize_rows_kernel,
    scaled_linear_kernel,
    sum_splits_kernel,
    unpack_int4_kernel,
)
from .weights import BLOCK_OUTPUTS, HALF_TILE, KERNEL_GROUP_SIZE, Fp4Weight, Int4Weight, ScaledWeight

# A group is one program's registers.
MAX_GROUP_SIZE = 65536
BYTE_DTYPES = tuple(LARGEST)
_NUMBERS_PER_PROGRAM = 1024
# As many groups as have so many numbers are quantised by one program.
_NUMBERS_PER_QUANTIZER = 2048
# A split has at least so many inputs for each row.
_INPUTS_PER_SPLIT_ROW = 8
# A split takes at least so many tiles of inputs: fewer would be mostly start and end.
_MIN_TILES_PER_SPLIT = 4
# So many of a tile's sums fit into registers twice: its own, and those that they are added to times its scales.
_SUMMED_NUMBERS = 64 * 64
# With fewer the tensor cores wait.
_MIN_STAGES = 3
# A program unpacks a tile of bytes so wide, eight of them a thread: those are sixteen bytes of what is written.
_OUTPUTS_PER_UNPACKER = 128
# Of shared memory, for other things than tiles.
_OTHER_SHARED_BYTES = 1024


@dataclass(frozen=True)
class Int4Tile:
    """What one program of the product with four bits computes, and how many of them a processor is given."""

    rows: int
    outputs: int
    num_warps: int
    per_processor: int
    num_stages: int


# The fastest of some twenty on an H200 each, for 4,096 outputs of 14,336 inputs: 32, 39, 52 and 74 µs, the last one
# before a weight was its first factor.
_INT4_TILES = (
    Int4Tile(16, 128, num_warps=4, per_processor=4, num_stages=6),
    Int4Tile(32, 64, num_warps=4, per_processor=5, num_stages=4),
    Int4Tile(64, 64, num_warps=4, per_processor=3, num_stages=4),
    Int4Tile(128, 128, num_warps=8, per_processor=2, num_stages=4),
)
# For weights of which each is scaled by itself.
_INT4_TILES_OF_SCALED = (
    Int4Tile(16, 64, num_warps=4, per_processor=4, num_stages=8),
    Int4Tile(32, 64, num_warps=4, per_processor=4, num_stages=8),
    Int4Tile(64, 64, num_warps=4, per_processor=4, num_stages=4),
    _INT4_TILES[-1],
)
# Where narrower ones are more than processors have room for at a time.
_WIDE_INT4_TILE = Int4Tile(64, 128, num_warps=4, per_processor=2, num_stages=4)
# For Hopper's registers: each weight is unpacked once for as many rows as a decode has.
_INT4_TILE_OF_MANY_ROWS = Int4Tile(256, 128, num_warps=8, per_processor=1, num_stages=4)


def int4_tile(
    num_rows: int, num_outputs: int, dtype: torch.dtype, is_of_one_group: bool, processors: int, on_hopper: bool
) -> Int4Tile:
    """The tile for a product of so many rows. is_of_one_group: see `has_tiles_of_one_group`."""
    rows = max(next_power_of_2(num_rows), 16)
    # Without tensor cores a tile of more rows does not fit into the registers.
    if dtype == torch.float32:
        return _INT4_TILES_OF_SCALED[0 if rows == 16 else 1]
    if rows > 128 and on_hopper:
        return _INT4_TILE_OF_MANY_ROWS
    tiles = _INT4_TILES if is_of_one_group else _INT4_TILES_OF_SCALED
    tile = next((each for each in tiles if each.rows == rows), tiles[-1])
    is_crowded = cdiv(num_outputs, tile.outputs) > tile.per_processor * processors
    return _WIDE_INT4_TILE if rows == _WIDE_INT4_TILE.rows and is_crowded else tile


@dataclass(frozen=True)
class ScaledTile:
    """What one program of the product of bytes computes at a time, and how many of them a processor has room for."""

    rows: int
    outputs: int
    num_warps: int
    per_processor: int
    max_stages: int = 4

    def num_stages(self, shared: int) -> int:
        """How many tiles of both factors are under way at a time, with so many bytes of shared memory."""
        return stages_in(shared, (self.rows + self.outputs) * KERNEL_GROUP_SIZE, self.max_stages)


def stages_in(shared: int, tile_bytes: int, most: int) -> int:
    """How many tiles of all factors, so many bytes together, are under way at a time in this much shared memory."""
    return max(2, min(most, (shared - _OTHER_SHARED_BYTES) // tile_bytes))


# Hopper's tensor cores take 64 rows at least from 8-bit floats as they are; fewer would be widened to 16 bits first.
_FEW_ROWS = ScaledTile(64, 128, num_warps=4, per_processor=2)
_SOME_ROWS = ScaledTile(128, 128, num_warps=8, per_processor=1, max_stages=5)
# A tile this wide asks the cache for a quarter less a product, and its sums fill the registers.
_MANY_ROWS = ScaledTile(128, 256, num_warps=8, per_processor=1)


def scaled_tile(num_rows: int, num_outputs: int, is_grouped: bool, processors: int, shared: int) -> ScaledTile:
    """The tile for a product of so many rows: as large as leaves every processor one, and as its memory holds."""
    if num_rows <= _FEW_ROWS.rows:
        return _FEW_ROWS
    num_wide = cdiv(num_rows, _MANY_ROWS.rows) * cdiv(num_outputs, _MANY_ROWS.outputs)
    # Groups need a second set of sums.
    is_narrow = is_grouped or num_wide < processors or _MANY_ROWS.num_stages(shared) < _MIN_STAGES
    return _SOME_ROWS if is_narrow else _MANY_ROWS


def quantize_rows_triton(x: Tensor, dtype: torch.dtype, group_size: int) -> tuple[Tensor, Tensor]:
    """See `quantize_rows_reference`."""
    check_launch("x", x, quantize_rows_kernel)
    check_tensor("x", x, (None, None), FLOAT_DTYPES, x.device, is_contiguous=False)
    return _quantize(x, x.shape[1], dtype, group_size, Gate.NONE)


def quantize_gated_triton(gate_up: Tensor, dtype: torch.dtype, group_size: int, gate: Gate) -> tuple[Tensor, Tensor]:
    """As `quantize_rows_triton` of what `gate` makes of gate_up: [n, 2 * in], gates first."""
    check_launch("gate_up", gate_up, quantize_rows_kernel)
    check_tensor("gate_up", gate_up, (None, None), FLOAT_DTYPES, gate_up.device, is_contiguous=False)
    if gate_up.shape[1] % 2:
        raise ValueError(f"gate_up {tuple(gate_up.shape)} must have an even number of columns, gate and up")
    return _quantize(gate_up, gate_up.shape[1] // 2, dtype, group_size, gate)


def _quantize(x: Tensor, num_inputs: int, dtype: torch.dtype, group_size: int, gate: Gate) -> tuple[Tensor, Tensor]:
    num_rows = len(x)
    if dtype not in LARGEST:
        raise ValueError(f"dtype must be int8 or float8_e4m3fn, not {str(dtype).removeprefix('torch.')}")
    if not 1 <= min(group_size, num_inputs) <= MAX_GROUP_SIZE:
        raise ValueError(f"group_size {group_size} for x {tuple(x.shape)} must be between 1 and {MAX_GROUP_SIZE}")
    group_size = min(group_size, num_inputs)
    num_groups = cdiv(num_inputs, group_size)
    values = torch.empty(num_rows, num_inputs, dtype=dtype, device=x.device)
    scales = torch.empty(num_rows, num_groups, dtype=torch.float32, device=x.device)
    if num_rows:
        padded = next_power_of_2(group_size)
        groups = min(max(_NUMBERS_PER_QUANTIZER // padded, 1), next_power_of_2(num_groups))
        quantize_rows_kernel[(num_rows, cdiv(num_groups, groups))](
            values,
            scales,
            x,
            num_inputs,
            group_size,
            num_groups,
            x.stride(0),
            LARGEST=LARGEST[dtype],
            IS_INT=dtype == torch.int8,
            IS_GATED=gate is not Gate.NONE,
            IS_SILU=gate is Gate.SILU,
            GROUPS=groups,
            PADDED_SIZE=padded,
            num_warps=min(max(groups * padded // 512, 1), 16),
            **early_launch(x.device),
        )
    return values, scales


def scaled_linear_triton(
    values: Tensor,
    scales: Tensor,
    weight: ScaledWeight,
    bias: Tensor | None,
    dtype: torch.dtype,
    num_splits: int | None = None,
    tile: ScaledTile | None = None,
) -> Tensor:
    """See `scaled_linear_reference`; sums of products are int32, or float32 as the tensor cores have them.

    num_splits: among how many programs a tile's inputs are shared, by default what fills the GPU. tile: by default
    `scaled_tile`'s.
    """
    num_outputs, num_inputs = _check_scaled(values, scales, weight, bias, dtype)
    num_rows, is_grouped = len(values), weight.num_groups > 1
    output = torch.empty(num_rows, num_outputs, dtype=dtype, device=values.device)
    if not output.numel():
        return output
    processors, shared = num_processors(values.device), shared_bytes(values.device)
    tile = tile or scaled_tile(num_rows, num_outputs, is_grouped, processors, shared)
    num_tiles = cdiv(num_rows, tile.rows) * cdiv(num_outputs, tile.outputs)
    inputs_tiles = cdiv(num_inputs, KERNEL_GROUP_SIZE)
    room = tile.per_processor * processors
    wanted = num_splits or _wanted_splits(num_rows, num_inputs, room // num_tiles, inputs_tiles)
    tiles_per_split = cdiv(inputs_tiles, wanted)
    splits = cdiv(inputs_tiles, tiles_per_split)
    parts = output if splits == 1 else torch.empty(splits, *output.shape, dtype=torch.float32, device=values.device)
    scaled_linear_kernel[(min(num_tiles * splits, room),)](
        parts,
        values,
        scales,
        weight.values,
        weight.scales,
        weight.scales if bias is None else bias,
        num_rows,
        num_outputs,
        num_inputs,
        weight.num_groups,
        splits,
        tiles_per_split,
        HAS_BIAS=bias is not None and splits == 1,
        IS_GROUPED=is_grouped,
        HAS_BLOCKS=is_grouped and weight.has_blocks and BLOCK_OUTPUTS % tile.outputs == 0,
        IS_INT=values.dtype == torch.int8,
        IS_WHOLE=num_inputs % KERNEL_GROUP_SIZE == 0,
        ROWS=tile.rows,
        OUTPUTS=tile.outputs,
        INPUTS=KERNEL_GROUP_SIZE,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages(shared),
        **early_launch(values.device),
    )
    if splits > 1:
        _sum_splits(output, parts, bias)
    return output


def int4_linear_triton(
    x: Tensor,
    weight: Int4Weight | Fp4Weight,
    bias: Tensor | None = None,
    num_splits: int | None = None,
    tile: Int4Tile | None = None,
) -> Tensor:
    """See `int4_linear_reference`; x has its inputs at the weight's places already: an order is not applied.

    num_splits: among how many programs a tile's inputs are shared, by default what fills the GPU. tile: by default
    `int4_tile`'s.
    """
    check_int4(x, weight, bias)
    num_rows, num_outputs = len(x), weight.num_outputs
    output = torch.empty(num_rows, num_outputs, dtype=x.dtype, device=x.device)
    if not output.numel():
        return output
    is_fp4, num_groups, processors = isinstance(weight, Fp4Weight), len(weight.scales), num_processors(x.device)
    is_of_one_group = has_tiles_of_one_group(weight, num_groups, is_fp4)
    tile = tile or int4_tile(num_rows, num_outputs, x.dtype, is_of_one_group, processors, is_hopper(x.device))
    grid = (cdiv(num_rows, tile.rows), cdiv(num_outputs, tile.outputs))
    num_tiles = cdiv(weight.num_inputs, 2 * HALF_TILE)
    to_fill = tile.per_processor * processors // (grid[0] * grid[1])
    wanted = num_splits or _wanted_splits(num_rows, weight.num_inputs, to_fill, num_tiles)
    tiles_per_split = cdiv(num_tiles, wanted)
    splits = cdiv(num_tiles, tiles_per_split)
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
        num_groups,
        x.stride(0),
        HAS_BIAS=bias is not None and splits == 1,
        OUTPUTS=tile.outputs,
        num_warps=tile.num_warps,
        **int4_options(weight, num_groups, x.dtype, tile.rows, tile.outputs, is_fp4, tile.num_stages),
        **early_launch(x.device),
    )
    if splits > 1:
        _sum_splits(output, parts, bias)
    return output


def unpack_int4_triton(weight: Int4Weight | Fp4Weight, outputs: range, dtype: torch.dtype) -> Tensor:
    """`weight.dequantized(dtype)` of some outputs, transposed, its inputs at their places: [in, len(outputs)]."""
    check_launch("weight.packed", weight.packed, unpack_int4_kernel)
    unpacked = torch.empty(weight.num_inputs, len(outputs), dtype=dtype, device=weight.packed.device)
    if unpacked.numel():
        num_tiles = cdiv(weight.num_inputs, 2 * HALF_TILE)
        unpack_int4_kernel[(num_tiles, cdiv(len(outputs), _OUTPUTS_PER_UNPACKER))](
            unpacked,
            weight.packed,
            weight.scales,
            weight.zeros,
            outputs.start,
            len(outputs),
            weight.num_outputs,
            weight.num_inputs,
            len(weight.scales),
            GROUP_SIZE=weight.group_size,
            HAS_MINIMA=weight.has_minima,
            IS_FP4=isinstance(weight, Fp4Weight),
            OUTPUTS=_OUTPUTS_PER_UNPACKER,
            HALF_TILE=HALF_TILE,
            num_warps=_OUTPUTS_PER_UNPACKER * HALF_TILE // 256,
            **early_launch(unpacked.device),
        )
    return unpacked


class _InGroups(Protocol):
    """Of weights in four bits, or of experts' side by side."""

    @property
    def has_minima(self) -> bool: ...

    @property
    def group_size(self) -> int: ...

    @property
    def num_inputs(self) -> int: ...

    @property
    def packed(self) -> Tensor: ...

    @property
    def scales(self) -> Tensor: ...

    @property
    def zeros(self) -> Tensor: ...


def has_tiles_of_one_group(weight: _InGroups, num_groups: int, is_fp4: bool) -> bool:
    """Whether a tile's weights have one scale an output, and whole numbers for zeros: sums may be scaled instead."""
    return not (is_fp4 or weight.has_minima) and (num_groups == 1 or weight.group_size % (2 * HALF_TILE) == 0)


def int4_options(
    weight: _InGroups,
    num_groups: int,
    dtype: torch.dtype,
    rows: int,
    outputs: int,
    is_fp4: bool,
    num_stages: int | None = None,
) -> dict[str, Any]:
    """What products in four bits are compiled for, with a tile of so many rows of x and outputs."""
    is_of_one_group = has_tiles_of_one_group(weight, num_groups, is_fp4)
    return {
        "GROUP_SIZE": weight.group_size,
        "IS_OF_ONE_GROUP": is_of_one_group,
        "SCALES_SUMS": is_of_one_group and rows * outputs <= _SUMMED_NUMBERS,
        "WEIGHT_FIRST": _is_weight_first(dtype, rows, weight.packed.device),
        "HAS_MINIMA": weight.has_minima,
        "IS_FP4": is_fp4,
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        "IS_WHOLE": weight.num_inputs % (2 * HALF_TILE) == 0,
        "ROWS": rows,
        "HALF_TILE": HALF_TILE,
        # A narrow tile is few bytes: many are to be under way.
        "num_stages": num_stages or (8 if outputs == 64 else 4),
    }


def _is_weight_first(dtype: torch.dtype, rows: int, device: torch.device) -> bool:
    """Whether a tile's product is faster with the weight as its first factor.

    As the second one it goes through shared memory once it is unpacked, or into more registers than there are. But
    tensor cores that are waited for take as long for few rows of x as for many (16 rows on an H200: 50 µs for 32). And
    of float32 that is unpacked from four bits Triton would have a B200's cut what TF32 has not, although it is told not
    to, if a tile had 64 outputs for its first side.
    """
    return dtype != torch.float32 and (rows > 64 or not multiplies_asynchronously(device))


def _sum_splits(output: Tensor, parts: Tensor, bias: Tensor | None) -> None:
    grid = (cdiv(output.numel(), _NUMBERS_PER_PROGRAM),)
    sum_splits_kernel[grid](
        output,
        parts,
        parts if bias is None else bias,
        *output.shape,
        HAS_BIAS=bias is not None,
        SPLITS=len(parts),
        NUMBERS=_NUMBERS_PER_PROGRAM,
        **early_launch(output.device),
    )


def _wanted_splits(num_rows: int, num_inputs: int, to_fill: int, num_tiles: int) -> int:
    """Among how many to share `num_tiles` tiles of inputs, where `to_fill` would fill the GPU."""
    # Splits write and read sums, four bytes each: they are to stay few beside the weight.
    affordable = num_inputs // (_INPUTS_PER_SPLIT_ROW * num_rows)
    return max(1, min(to_fill, num_tiles // _MIN_TILES_PER_SPLIT, affordable))


def _check_scaled(
    values: Tensor, scales: Tensor, weight: ScaledWeight, bias: Tensor | None, dtype: torch.dtype
) -> tuple[int, int]:
    """The weight's shape, when all fits together."""
    check_launch("values", values, scaled_linear_kernel)
    device = values.device
    check_tensor("weight.values", weight.values, (None, None), BYTE_DTYPES, device)
    num_outputs, num_inputs = weight.values.shape
    check_tensor("values", values, (None, num_inputs), (weight.values.dtype,), device)
    num_groups = cdiv(num_inputs, weight.group_size)
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


def check_int4(x: Tensor, weight: Int4Weight | Fp4Weight, bias: Tensor | None) -> None:
    """Raises `ValueError` where something does not fit."""
    check_launch("x", x, int4_linear_kernel)
    check_tensor("x", x, (None, weight.num_inputs), FLOAT_DTYPES, x.device, is_contiguous=False)
    num_bytes = cdiv(weight.num_inputs, 2 * HALF_TILE) * HALF_TILE
    check_tensor("weight.packed", weight.packed, (num_bytes, None), (torch.uint8,), x.device)
    num_groups = cdiv(weight.num_inputs, weight.group_size)
    check_groups("weight", weight, (num_groups, weight.num_outputs), x.device)
    if bias is not None:
        check_tensor("bias", bias, (weight.num_outputs,), FLOAT_DTYPES, x.device)


def check_groups(name: str, weight: _InGroups, shape: tuple[int, ...], device: torch.device) -> None:
    """What there is beside values in four bits, of a weight or of experts: of this shape, groups before outputs."""
    if (factors := getattr(weight, "factors", None)) is None:
        check_tensor(f"{name}.scales", weight.scales, shape, FLOAT_DTYPES, device)
        check_tensor(f"{name}.zeros", weight.zeros, shape, (torch.uint8, *FLOAT_DTYPES), device)
    else:
        check_tensor(f"{name}.scales", weight.scales, shape, (torch.uint8,), device)
        check_tensor(f"{name}.factors", factors, (*shape[:-2], shape[-1]), (torch.float32,), device)
