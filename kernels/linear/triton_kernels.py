"""Products with quantised weights on the GPU, and the rows of activations quantised for them."""

import triton
import triton.language as tl

from ..activation.triton_kernels import gated
from ..triton_early_launch import wait_for_inputs

# Added to a float32 of less than 2 ** 22 and taken off again, it leaves the nearest whole number, ties to even.
ROUNDER = tl.constexpr(12582912.0)
LARGEST_FLOAT = tl.constexpr(3.4028234663852886e38)
# 2 ** 23 as a float32: its bits, whose lowest count ones, and the number.
NIBBLE_BITS = tl.constexpr(0x4B000000)
NIBBLE_BASE = tl.constexpr(8388608.0)
# What exponents count from is 15 in float16 and 1 in E2M1.
FP4_BASE = tl.constexpr(16384.0)
# And 7 in E4M3.
E4M3_BASE = tl.constexpr(256.0)


@triton.jit
def quantize_rows_kernel(
    values,
    scales,
    x,
    num_inputs,
    group_size,
    num_groups,
    x_stride,
    LARGEST: tl.constexpr,
    IS_INT: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_SILU: tl.constexpr,
    GROUPS: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """One program is `GROUPS` groups of a row.

    IS_GATED: a row has gates, then what they are multiplied with, and what comes of that is quantised.
    """
    wait_for_inputs(IS_EARLY)
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    place = tl.arange(0, PADDED_SIZE)[None, :]
    column = group[:, None] * group_size + place
    is_column = (place < group_size) & (column < num_inputs)
    wide = tl.load(x + row * x_stride + column, mask=is_column, other=0.0).to(tl.float32)
    if IS_GATED:
        up = tl.load(x + row * x_stride + num_inputs + column, mask=is_column, other=0.0).to(tl.float32)
        wide = gated(wide, up, IS_SILU, x.dtype.element_ty).to(tl.float32)
    quantized, scale = quantize_groups(wide, values.dtype.element_ty, LARGEST, IS_INT, GROUPS)
    tl.store(values + row * num_inputs + column, quantized, mask=is_column)
    tl.store(scales + row * num_groups + group, scale, mask=group < num_groups)


@triton.jit
def quantize_groups(wide, TYPE: tl.constexpr, LARGEST: tl.constexpr, IS_INT: tl.constexpr, GROUPS: tl.constexpr):
    """The bytes of [GROUPS, size] float32, and a scale for each group: one that is NaN where one of its numbers is."""
    largest = tl.max(tl.abs(wide), 1)
    is_nan = tl.max((wide != wide).to(tl.int32), 1)
    largest = tl.where(is_nan > 0, float("nan"), largest)
    limit = tl.full((GROUPS,), LARGEST, tl.float32)
    scaled = wide * tl.minimum(tl.div_rn(limit, largest), LARGEST_FLOAT)[:, None]
    # Of whole numbers too: without something between them product and sum become one instruction, which rounds once.
    scaled = tl.minimum(tl.maximum(scaled, -LARGEST), LARGEST)
    quantized = ((scaled + ROUNDER) - ROUNDER).to(tl.int8) if IS_INT else scaled.to(TYPE)
    return quantized, tl.div_rn(largest, limit)


# Not compiled again for numbers of rows that are multiples of 16, or one: a step has any number of them.
@triton.jit(do_not_specialize=["num_rows", "num_splits", "tiles_per_split"])
def scaled_linear_kernel(
    output,
    x,
    x_scales,
    weight,
    weight_scales,
    bias,
    num_rows,
    num_outputs,
    num_inputs,
    num_groups,
    num_splits,
    tiles_per_split,
    HAS_BIAS: tl.constexpr,
    IS_GROUPED: tl.constexpr,
    HAS_BLOCKS: tl.constexpr,
    IS_INT: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """A program takes tile after tile of the output, or of a split's part of it: splits take the inputs in turn.

    Neighbours share their part of the weight. A group is `INPUTS`. IS_WHOLE: the inputs are a multiple of `INPUTS`.
    """
    wait_for_inputs(IS_EARLY)
    num_row_tiles = tl.cdiv(num_rows, ROWS)
    num_tiles = num_row_tiles * tl.cdiv(num_outputs, OUTPUTS)
    for part in range(tl.program_id(0), num_tiles * num_splits, tl.num_programs(0)):
        tile, split = part % num_tiles, part // num_tiles
        row = (tile % num_row_tiles * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        first_column = (tile // num_row_tiles * OUTPUTS).to(tl.int64)
        column = first_column + tl.arange(0, OUTPUTS)
        is_row, is_column = row < num_rows, column < num_outputs
        begin = split * tiles_per_split * INPUTS
        product = scaled_product(
            x,
            x_scales,
            row,
            is_row,
            weight,
            weight_scales,
            first_column,
            column,
            is_column,
            begin,
            tl.minimum(begin + tiles_per_split * INPUTS, num_inputs),
            num_outputs,
            num_inputs,
            num_groups,
            IS_GROUPED,
            HAS_BLOCKS,
            IS_INT,
            IS_WHOLE,
            ROWS,
            OUTPUTS,
            INPUTS,
        )
        if HAS_BIAS:
            product += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
        place = output + (split.to(tl.int64) * num_rows + row)[:, None] * num_outputs + column[None, :]
        tl.store(place, product.to(output.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit
def scaled_product(
    x,
    x_scales,
    row,
    is_row,
    weight,
    weight_scales,
    first_column,
    column,
    is_column,
    begin,
    end,
    num_outputs,
    num_inputs,
    num_groups,
    IS_GROUPED: tl.constexpr,
    HAS_BLOCKS: tl.constexpr,
    IS_INT: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """Rows of x times rows of the weight, [ROWS, OUTPUTS] float32, of the inputs from `begin` to `end`.

    HAS_BLOCKS: in a group all columns, which begin with `first_column`, have one scale.
    """
    depth = tl.arange(0, INPUTS)
    x_tile = x + row[:, None] * num_inputs + depth[None, :]
    # Without a mask: what comes of columns that there are not is nobody's.
    weight_tile = weight + tl.minimum(column, num_outputs - 1)[None, :] * num_inputs + depth[:, None]
    sums = tl.zeros((ROWS, OUTPUTS), dtype=tl.int32 if IS_INT else tl.float32)
    product = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
    if IS_GROUPED:
        rows_at = x_scales + row * num_groups
        columns_at = weight_scales + (first_column if HAS_BLOCKS else column)
        group = begin // INPUTS
        next_rows = tl.load(rows_at + group, mask=is_row, other=0.0)
        next_columns = _of_columns(columns_at + group * num_outputs, is_column, HAS_BLOCKS)
    for first in range(begin, end, INPUTS):
        if IS_WHOLE:
            left = tl.load(x_tile + first, mask=is_row[:, None], other=0.0)
            right = tl.load(weight_tile + first)
        else:
            is_input = first + depth < num_inputs
            left = tl.load(x_tile + first, mask=is_row[:, None] & is_input[None, :], other=0.0)
            right = tl.load(weight_tile + first, mask=is_input[:, None], other=0.0)
        if IS_GROUPED:
            # On their way while this tile is computed: what no product reads is not fetched ahead by the compiler.
            of_rows, of_columns = next_rows, next_columns
            group = tl.minimum(first // INPUTS + 1, num_groups - 1)
            next_rows = tl.load(rows_at + group, mask=is_row, other=0.0)
            next_columns = _of_columns(columns_at + group * num_outputs, is_column, HAS_BLOCKS)
            partial = tl.dot(left, right, out_dtype=sums.dtype).to(tl.float32)
            if HAS_BLOCKS:
                product += partial * (of_rows * of_columns)[:, None]
            else:
                product += partial * of_rows[:, None] * of_columns[None, :]
        else:
            sums = tl.dot(left, right, sums, out_dtype=sums.dtype)
    if not IS_GROUPED:
        of_rows = tl.load(x_scales + row, mask=is_row, other=0.0)
        of_columns = tl.load(weight_scales + column, mask=is_column, other=0.0)
        product = sums.to(tl.float32) * of_rows[:, None] * of_columns[None, :]
    return product


@triton.jit
def _of_columns(scales, is_column, HAS_BLOCKS: tl.constexpr):
    """Each column's scale, or that of all."""
    return tl.load(scales) if HAS_BLOCKS else tl.load(scales, mask=is_column, other=0.0)


@triton.jit(do_not_specialize=["num_rows", "tiles_per_split"])
def int4_linear_kernel(
    output,
    x,
    packed,
    scales,
    zeros,
    bias,
    num_rows,
    num_outputs,
    num_inputs,
    tiles_per_split,
    num_groups,
    x_stride,
    GROUP_SIZE: tl.constexpr,
    IS_OF_ONE_GROUP: tl.constexpr,
    SCALES_SUMS: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_MINIMA: tl.constexpr,
    IS_FP4: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    HALF_TILE: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """One program is a tile of the output, or of one split's part of it: splits take the inputs' tiles in turn."""
    wait_for_inputs(IS_EARLY)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    split = tl.program_id(2).to(tl.int64)
    is_row, is_column = row < num_rows, column < num_outputs
    first_tile = split.to(tl.int32) * tiles_per_split
    product = int4_product(
        x + row * x_stride,
        is_row,
        packed,
        scales,
        zeros,
        column,
        is_column,
        first_tile,
        tl.minimum(first_tile + tiles_per_split, tl.cdiv(num_inputs, 2 * HALF_TILE)),
        num_outputs,
        num_inputs,
        num_groups,
        GROUP_SIZE,
        IS_OF_ONE_GROUP,
        SCALES_SUMS,
        WEIGHT_FIRST,
        HAS_MINIMA,
        IS_FP4,
        PRECISION,
        IS_WHOLE,
        ROWS,
        OUTPUTS,
        HALF_TILE,
    )
    if HAS_BIAS:
        product += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    place = output + (split * num_rows + row)[:, None] * num_outputs + column[None, :]
    tl.store(place, product.to(output.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit
def int4_product(
    x_rows,
    is_row,
    packed,
    scales,
    zeros,
    column,
    is_column,
    first_tile,
    end_tile,
    num_outputs,
    num_inputs,
    num_groups,
    GROUP_SIZE: tl.constexpr,
    IS_OF_ONE_GROUP: tl.constexpr,
    SCALES_SUMS: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr,
    HAS_MINIMA: tl.constexpr,
    IS_FP4: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    HALF_TILE: tl.constexpr,
):
    """Rows of x, at their first inputs [ROWS], times a weight's columns: [ROWS, OUTPUTS] float32, of some tiles.

    WEIGHT_FIRST: the weight is the product's first factor, which tensor cores take from the registers that it is
    unpacked into; the second goes through shared memory.
    IS_OF_ONE_GROUP: in a tile each column has one scale, and a whole number for its zero. SCALES_SUMS: then it is the
    sums that are scaled. IS_WHOLE: the inputs are a multiple of a tile's.
    IS_FP4: values are E2M1, without zeros. Of these in groups of less than half a tile (NVFP4) scales are bytes of
    E4M3, and `zeros` what columns are multiplied by.
    """
    byte = tl.arange(0, HALF_TILE)
    last_group = num_groups - 1
    factor = _factor(zeros, column, is_column, IS_FP4 and GROUP_SIZE < HALF_TILE)
    product = tl.zeros((OUTPUTS, ROWS) if WEIGHT_FIRST else (ROWS, OUTPUTS), dtype=tl.float32)
    if SCALES_SUMS:
        group = tl.minimum(2 * first_tile * HALF_TILE // GROUP_SIZE, last_group) * num_outputs
        next_scale = tl.load(scales + group + column, mask=is_column, other=0.0)
    for tile in range(first_tile, end_tile):
        first_byte = _side(tile * HALF_TILE + byte, not WEIGHT_FIRST).to(tl.int64)
        bytes_at = packed + first_byte * num_outputs + _side(column, WEIGHT_FIRST)
        values = tl.load(bytes_at, mask=_side(is_column, WEIGHT_FIRST), other=0)
        if IS_OF_ONE_GROUP:
            place = tl.minimum(2 * tile * HALF_TILE // GROUP_SIZE, last_group) * num_outputs + column
            zero = tl.load(zeros + place, mask=is_column, other=0).to(tl.float32) + NIBBLE_BASE
            zero = _side(zero, WEIGHT_FIRST)
            if SCALES_SUMS:
                # On its way while this tile is computed: what no product reads is not fetched ahead by the compiler.
                scale = next_scale
                group = tl.minimum(2 * (tile + 1) * HALF_TILE // GROUP_SIZE, last_group) * num_outputs
                next_scale = tl.load(scales + group + column, mask=is_column, other=0.0)
            else:
                scale = tl.load(scales + place, mask=is_column, other=0.0)
            scale = _side(scale.to(tl.float32), WEIGHT_FIRST)
        sums = tl.zeros_like(product) if SCALES_SUMS else product
        for half in tl.static_range(2):
            first = (2 * tile + half) * HALF_TILE
            if SCALES_SUMS:
                # Exact in 16 bits.
                weight = _nibbles(values, half) - zero
            elif IS_OF_ONE_GROUP:
                weight = (_nibbles(values, half) - zero) * scale
            else:
                weight = _int4_weights(
                    values,
                    half,
                    first,
                    scales,
                    zeros,
                    factor,
                    column,
                    is_column,
                    num_outputs,
                    last_group,
                    GROUP_SIZE,
                    HAS_MINIMA,
                    IS_FP4,
                    WEIGHT_FIRST,
                    HALF_TILE,
                )
            weight = weight.to(x_rows.dtype.element_ty)
            inputs = _inputs(x_rows, first + byte, is_row, num_inputs, IS_WHOLE, WEIGHT_FIRST)
            if WEIGHT_FIRST:
                sums = tl.dot(weight, inputs, sums, input_precision=PRECISION)
            else:
                sums = tl.dot(inputs, weight, sums, input_precision=PRECISION)
        product = product + sums * scale if SCALES_SUMS else sums
    return tl.trans(product) if WEIGHT_FIRST else product


@triton.jit
def _factor(factors, column, is_column, HAS_FACTORS: tl.constexpr):
    """What columns are multiplied by beside their scales: one where they have no factors."""
    return tl.load(factors + column, mask=is_column, other=0.0) if HAS_FACTORS else 1.0


@triton.jit
def _int4_weights(
    values,
    half,
    first,
    scales,
    zeros,
    factor,
    column,
    is_column,
    num_outputs,
    last_group,
    GROUP_SIZE: tl.constexpr,
    HAS_MINIMA: tl.constexpr,
    IS_FP4: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr,
    HALF_TILE: tl.constexpr,
):
    """What the low four bits of bytes stand for, or the high ones, which begin with input `first`.

    float32: [OUTPUTS, HALF_TILE], or, not WEIGHT_FIRST, turned.
    """
    group = first // GROUP_SIZE
    place = tl.minimum(group, last_group) * num_outputs + column
    if IS_FP4 and GROUP_SIZE < HALF_TILE:
        tl.static_assert(2 * GROUP_SIZE == HALF_TILE)
        second = tl.minimum(group + 1, last_group) * num_outputs + column
        scale = tl.where(
            _side(tl.arange(0, HALF_TILE) < GROUP_SIZE, not WEIGHT_FIRST),
            _side(_e4m3(tl.load(scales + place, mask=is_column, other=0)) * factor, WEIGHT_FIRST),
            _side(_e4m3(tl.load(scales + second, mask=is_column, other=0)) * factor, WEIGHT_FIRST),
        )
        weight = _fp4_nibbles(values, half) * (scale * FP4_BASE)
    else:
        scale = _side(tl.load(scales + place, mask=is_column, other=0.0).to(tl.float32), WEIGHT_FIRST)
        if IS_FP4:
            weight = _fp4_nibbles(values, half) * (scale * FP4_BASE)
        else:
            zero = _side(tl.load(zeros + place, mask=is_column, other=0).to(tl.float32), WEIGHT_FIRST)
            if HAS_MINIMA:
                weight = (_nibbles(values, half) - NIBBLE_BASE) * scale - zero
            else:
                weight = (_nibbles(values, half) - (zero + NIBBLE_BASE)) * scale
    return weight


@triton.jit
def unpack_int4_kernel(
    unpacked,
    packed,
    scales,
    zeros,
    first_output,
    num_unpacked,
    num_outputs,
    num_inputs,
    num_groups,
    GROUP_SIZE: tl.constexpr,
    HAS_MINIMA: tl.constexpr,
    IS_FP4: tl.constexpr,
    OUTPUTS: tl.constexpr,
    HALF_TILE: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """`num_unpacked` columns of a weight from `first_output` on: [in, num_unpacked]. One program is a tile of bytes."""
    wait_for_inputs(IS_EARLY)
    tile = tl.program_id(0)
    byte = tl.arange(0, HALF_TILE)
    place = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_column, column = place < num_unpacked, first_output + place
    bytes_at = packed + (tile * HALF_TILE + byte)[:, None].to(tl.int64) * num_outputs + column[None, :]
    values = tl.load(bytes_at, mask=is_column[None, :], other=0)
    factor = _factor(zeros, column, is_column, IS_FP4 and GROUP_SIZE < HALF_TILE)
    for half in tl.static_range(2):
        first = (2 * tile + half) * HALF_TILE
        weight = _int4_weights(
            values,
            half,
            first,
            scales,
            zeros,
            factor,
            column,
            is_column,
            num_outputs,
            num_groups - 1,
            GROUP_SIZE,
            HAS_MINIMA,
            IS_FP4,
            False,
            HALF_TILE,
        )
        depth = first + byte
        row = unpacked + depth[:, None].to(tl.int64) * num_unpacked + place[None, :]
        is_stored = (depth < num_inputs)[:, None] & is_column[None, :]
        tl.store(row, weight.to(unpacked.dtype.element_ty), mask=is_stored)


@triton.jit
def _side(numbers, IS_FIRST: tl.constexpr):
    """Numbers along a tile's first side or along its second."""
    return numbers[:, None] if IS_FIRST else numbers[None, :]


@triton.jit
def _inputs(x_rows, depth, is_row, num_inputs, IS_WHOLE: tl.constexpr, WEIGHT_FIRST: tl.constexpr):
    """Of rows of x: [ROWS, depths], or, WEIGHT_FIRST, turned. IS_WHOLE: there are all of these inputs."""
    is_there = _side(is_row, not WEIGHT_FIRST)
    if not IS_WHOLE:
        is_there &= _side(depth < num_inputs, WEIGHT_FIRST)
    return tl.load(_side(x_rows, not WEIGHT_FIRST) + _side(depth, WEIGHT_FIRST), mask=is_there, other=0.0)


@triton.jit
def _nibbles(values, half):
    """The low four bits of bytes, or the high ones, as float32 and `NIBBLE_BASE` too large."""
    # As the low bits of 2 ** 23, exactly: converting whole numbers is several times slower than adding.
    bits = ((values.to(tl.int32) >> (4 * half)) & 15) | NIBBLE_BITS
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _fp4_nibbles(values, half):
    """The low four bits of bytes, or the high ones, as float32 and `FP4_BASE` times too small."""
    # Sign, two bits of exponent and one behind the point are in their places in float16, subnormal numbers too.
    bits = values.to(tl.int32) >> (4 * half)
    return (((bits & 8) << 12) | ((bits & 7) << 9)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _e4m3(values):
    """Bytes of E4M3 as float32. By hand, as Ampere has no 8-bit floats."""
    bits = values.to(tl.int32)
    half = (((bits & 128) << 8) | ((bits & 127) << 7)).to(tl.int16).to(tl.float16, bitcast=True)
    return half.to(tl.float32) * E4M3_BASE


@triton.jit(do_not_specialize=["num_rows"])
def sum_splits_kernel(
    output,
    parts,
    bias,
    num_rows,
    num_outputs,
    HAS_BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    NUMBERS: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """The splits' parts added in their order, so that the same product is the same every time."""
    wait_for_inputs(IS_EARLY)
    size = num_rows.to(tl.int64) * num_outputs
    index = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    is_number = index < size
    total = tl.zeros((NUMBERS,), dtype=tl.float32)
    # All loads are on their way before the first sum.
    for split in tl.static_range(SPLITS):
        total += tl.load(parts + split * size + index, mask=is_number, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + index % num_outputs, mask=is_number, other=0.0).to(tl.float32)
    tl.store(output + index, total.to(output.dtype.element_ty), mask=is_number)
