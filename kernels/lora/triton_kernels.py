"""LoRA's two products for tokens of several adapters (as S-LoRA, arXiv 2311.03285, and Punica, 2310.18547, have them).

Both run on a grid of fixed size and read from device memory how many tiles of tokens there are, so that a captured
launch serves any mix of adapters; tokens without one are in no tile and cost nothing.
"""

import triton
import triton.language as tl

from ..triton_early_launch import wait_for_inputs

TILE_SIZE = tl.constexpr(3)


# Steps have any number of tokens.
@triton.jit(do_not_specialize=["num_tokens"])
def shrink_kernel(
    low,
    x,
    down,
    ranks,
    num_tiles,
    tiles,
    tokens,
    num_tokens,
    num_inputs,
    inputs_per_split,
    x_stride,
    PARTS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    RANK_TILE: tl.constexpr,
    INPUTS: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """low[split] = x @ downᵀ over a split's inputs. A unit is a tile of tokens, a part, some of its rank, a split."""
    wait_for_inputs(IS_EARLY)
    per_part: tl.constexpr = (MAX_RANK + RANK_TILE - 1) // RANK_TILE * SPLITS
    for unit in range(tl.program_id(0), tl.load(num_tiles) * PARTS * per_part, tl.num_programs(0)):
        tile = tiles + unit // (PARTS * per_part) * TILE_SIZE
        part = unit // per_part % PARTS
        split = unit % SPLITS
        slot, first, count = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
        nth = unit % per_part // SPLITS * RANK_TILE + tl.arange(0, RANK_TILE)
        is_rank = nth < tl.load(ranks + slot * PARTS + part)
        if tl.max(is_rank.to(tl.int32), 0) > 0:
            row = tl.arange(0, ROWS)
            is_row = row < count
            token = tl.load(tokens + first + row, mask=is_row, other=0).to(tl.int64)
            depth = tl.arange(0, INPUTS)
            x_tile = x + token[:, None] * x_stride + depth[None, :]
            of_rank = ((slot * PARTS + part) * MAX_RANK + nth).to(tl.int64)
            down_tile = down + of_rank[None, :] * num_inputs + depth[:, None]
            sums = tl.zeros((ROWS, RANK_TILE), dtype=tl.float32)
            begin = split * inputs_per_split
            for start in range(begin, tl.minimum(begin + inputs_per_split, num_inputs), INPUTS):
                is_input = start + depth < num_inputs
                left = tl.load(x_tile + start, mask=is_row[:, None] & is_input[None, :], other=0.0)
                right = tl.load(down_tile + start, mask=is_rank[None, :] & is_input[:, None], other=0.0)
                sums = tl.dot(left, right, sums, input_precision=PRECISION)
            entry = split.to(tl.int64) * num_tokens + first + row
            at = low + (entry[:, None] * PARTS + part) * MAX_RANK + nth[None, :]
            # Zeros where an adapter's rank ends: read in whole, while ranks are at no multiple of anything.
            low_rank = tl.where(is_rank[None, :], sums, 0.0)
            tl.store(at, low_rank, mask=is_row[:, None] & (nth < MAX_RANK)[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def expand_kernel(
    output,
    low,
    up,
    ranks,
    column_tiles,
    num_tiles,
    tiles,
    tokens,
    num_tokens,
    num_column_tiles,
    num_outputs,
    output_stride,
    PARTS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    RANK_TILE: tl.constexpr,
    ARE_ALIGNED: tl.constexpr,
    OUTPUTS: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """output += low @ up, the splits of `low` added up. A unit is a tile of tokens and some outputs of one part."""
    wait_for_inputs(IS_EARLY)
    for unit in range(tl.program_id(0), tl.load(num_tiles) * num_column_tiles, tl.num_programs(0)):
        tile = tiles + unit // num_column_tiles * TILE_SIZE
        slot, first, count = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
        columns = column_tiles + unit % num_column_tiles * TILE_SIZE
        part, column_begin, column_end = tl.load(columns), tl.load(columns + 1), tl.load(columns + 2)
        if ARE_ALIGNED:
            column_begin, column_end = tl.multiple_of(column_begin, 8), tl.multiple_of(column_end, 8)
        rank = tl.load(ranks + slot * PARTS + part)
        if rank > 0:
            row = tl.arange(0, ROWS)
            is_row = row < count
            column = column_begin + tl.arange(0, OUTPUTS)
            is_column = column < column_end
            sums = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
            for start in range(0, rank, RANK_TILE):
                nth = start + tl.arange(0, RANK_TILE)
                is_rank = nth < rank
                wide = tl.zeros((ROWS, RANK_TILE), dtype=tl.float32)
                for split in tl.static_range(SPLITS):
                    entry = (first + row).to(tl.int64) + split * num_tokens
                    of_split = low + (entry[:, None] * PARTS + part) * MAX_RANK + nth[None, :]
                    wide += tl.load(of_split, mask=is_row[:, None] & (nth < MAX_RANK)[None, :], other=0.0)
                up_tile = up + (slot * MAX_RANK + nth).to(tl.int64)[:, None] * num_outputs + column[None, :]
                right = tl.load(up_tile, mask=is_rank[:, None] & is_column[None, :], other=0.0)
                sums = tl.dot(wide.to(right.dtype), right, sums, input_precision=PRECISION)
            token = tl.load(tokens + first + row, mask=is_row, other=0).to(tl.int64)
            at = output + token[:, None] * output_stride + column[None, :]
            is_entry = is_row[:, None] & is_column[None, :]
            summed = tl.load(at, mask=is_entry, other=0.0).to(tl.float32) + sums
            tl.store(at, summed.to(output.dtype.element_ty), mask=is_entry)
