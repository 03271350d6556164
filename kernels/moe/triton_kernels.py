"""A mixture's experts on the GPU, without the host's knowing who goes where.

The pairs of a token and one of its experts are put in the experts' order and cut into tiles of one expert each. How
many tiles there may be follows from sizes alone, so a captured launch serves any choice; tiles that are empty end at
once. Numbers are float32 between loading and storing.
"""

import triton
import triton.language as tl

from ..activation.triton_kernels import gated
from ..linear.triton_kernels import int4_product, scaled_product
from ..triton_early_launch import wait_for_inputs

# Of a tile: its expert, the place of its first pair among the sorted ones, and how many it has.
TILE_SIZE = tl.constexpr(3)


# Steps have any number of tokens.
@triton.jit(do_not_specialize=["num_tokens"])
def choose_experts_kernel(
    ids,
    shares,
    logits,
    correction,
    num_tokens,
    logits_stride,
    scale,
    NUM_EXPERTS: tl.constexpr,
    CHOSEN: tl.constexpr,
    NORMALISE: tl.constexpr,
    IS_CORRECTED: tl.constexpr,
    ARE_SIGMOIDS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr,
    TOKENS: tl.constexpr,
    PADDED_EXPERTS: tl.constexpr,
    PADDED_CHOSEN: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """One program is `TOKENS` tokens. Of equal scores the first expert's counts."""
    wait_for_inputs(IS_EARLY)
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    is_token = token < num_tokens
    expert = tl.arange(0, PADDED_EXPERTS)[None, :]
    is_expert = expert < NUM_EXPERTS
    at = logits + token[:, None] * logits_stride + expert
    wide = tl.load(at, mask=is_token[:, None] & is_expert, other=0.0).to(tl.float32)
    if ARE_SIGMOIDS:
        scores = tl.sigmoid(wide)
        left = scores
        total = tl.full((TOKENS,), 1.0, tl.float32)
    else:
        left = tl.where(is_expert, wide, -float("inf"))
        scores = tl.exp(left - tl.max(left, 1)[:, None])
        total = tl.sum(scores, 1)
    if IS_CORRECTED:
        added = tl.load(correction + expert, mask=is_expert, other=0.0)
        left = tl.where(is_expert, scores / total[:, None] + added, -float("inf"))
    # A number that is none compares with nothing: threads that look for the largest together would differ about it.
    left = tl.where(left == left, left, -float("inf"))
    if CHOSEN_GROUPS < NUM_GROUPS:
        left = _within_groups(
            left, expert, NUM_EXPERTS // NUM_GROUPS, NUM_GROUPS, CHOSEN_GROUPS, PADDED_GROUPS, IS_CORRECTED
        )
    place = tl.arange(0, PADDED_CHOSEN)[None, :]
    chosen = tl.zeros((TOKENS, PADDED_CHOSEN), dtype=tl.int32)
    weights = tl.zeros((TOKENS, PADDED_CHOSEN), dtype=tl.float32)
    for nth in tl.static_range(CHOSEN):
        best = tl.argmax(left, 1)[:, None]
        weight = tl.sum(tl.where(expert == best, scores, 0.0), 1)
        chosen = tl.where(place == nth, best, chosen)
        weights = tl.where(place == nth, weight[:, None], weights)
        left = tl.where(expert == best, -float("inf"), left)
    if NORMALISE:
        total = tl.sum(weights, 1)
    is_chosen = is_token[:, None] & (place < CHOSEN)
    tl.store(ids + token[:, None] * CHOSEN + place, chosen.to(tl.int64), mask=is_chosen)
    tl.store(shares + token[:, None] * CHOSEN + place, weights * (scale / total[:, None]), mask=is_chosen)


@triton.jit
def _within_groups(
    left,
    expert,
    SIZE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
    IS_CORRECTED: tl.constexpr,
):
    """The scores, -inf outside of the groups with the best expert, or of corrected ones with the best two together."""
    group = tl.arange(0, PADDED_GROUPS)[None, :]
    sums = tl.full((left.shape[0], PADDED_GROUPS), -float("inf"), tl.float32)
    for nth in range(NUM_GROUPS):
        own = tl.where(expert // SIZE == nth, left, -float("inf"))
        best = tl.max(own, 1)
        if IS_CORRECTED:
            best += tl.max(tl.where(expert == tl.argmax(own, 1)[:, None], -float("inf"), own), 1)
        sums = tl.where(group == nth, best[:, None], sums)
    is_left = tl.zeros(left.shape, dtype=tl.int32)
    for _ in tl.static_range(CHOSEN_GROUPS):
        # A sum of two infinities is no number, and names no group.
        best_group = tl.minimum(tl.argmax(sums, 1), NUM_GROUPS - 1)[:, None]
        is_left = tl.where(expert // SIZE == best_group, 1, is_left)
        sums = tl.where(group == best_group, -float("inf"), sums)
    return tl.where(is_left > 0, left, -float("inf"))


@triton.jit(do_not_specialize=["num_pairs"])
def sort_pairs_kernel(
    pairs,
    tiles,
    ids,
    num_pairs,
    NUM_EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """One program is an expert: it puts its pairs behind those of the experts before it, and writes its tiles.

    Its tiles begin at a number that the experts before it leave free however their pairs are spread; no more than one
    of them is empty.
    """
    wait_for_inputs(IS_EARLY)
    expert = tl.program_id(0)
    nth = tl.arange(0, PAIRS)
    before, count = 0, 0
    for first in range(0, num_pairs, PAIRS):
        chosen = tl.load(ids + first + nth, mask=first + nth < num_pairs, other=NUM_EXPERTS).to(tl.int32)
        before += tl.sum((chosen < expert).to(tl.int32), 0)
        count += tl.sum((chosen == expert).to(tl.int32), 0)
    begin = before
    for first in range(0, num_pairs, PAIRS):
        chosen = tl.load(ids + first + nth, mask=first + nth < num_pairs, other=NUM_EXPERTS).to(tl.int32)
        is_own = (chosen == expert).to(tl.int32)
        tl.store(pairs + begin + tl.cumsum(is_own, 0) - 1, first + nth, mask=is_own > 0)
        begin += tl.sum(is_own, 0)
    first_tile = before // ROWS + expert
    num_tiles = (before + count) // ROWS + expert + 1 - first_tile
    for first in range(0, num_tiles, PAIRS):
        row = (first + nth) * ROWS
        tile, is_tile = tiles + (first_tile + first + nth) * TILE_SIZE, first + nth < num_tiles
        tl.store(tile, tl.zeros((PAIRS,), dtype=tl.int32) + expert, mask=is_tile)
        tl.store(tile + 1, before + row, mask=is_tile)
        tl.store(tile + 2, tl.minimum(tl.maximum(count - row, 0), ROWS), mask=is_tile)


@triton.jit
def gated_experts_kernel(
    output,
    x,
    weight,
    pairs,
    tiles,
    num_outputs,
    num_inputs,
    num_column_tiles,
    x_stride,
    CHOSEN: tl.constexpr,
    IS_SILU: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """The first products of the tokens' rows, gates and what they are multiplied with at once, in the sorted order."""
    wait_for_inputs(IS_EARLY)
    tile = tiles + tl.program_id(0) // num_column_tiles * TILE_SIZE
    if tl.load(tile + 2) > 0:
        expert, place, is_row, pair = _rows(tile, pairs, ROWS)
        column = tl.program_id(0) % num_column_tiles * OUTPUTS + tl.arange(0, OUTPUTS)
        is_column = column < num_outputs
        depth = tl.arange(0, INPUTS)
        x_tile = x + (pair // CHOSEN)[:, None] * x_stride + depth[None, :]
        gate_tile = weight + expert * 2 * num_outputs * num_inputs + column[None, :] * num_inputs + depth[:, None]
        up_tile = gate_tile + num_outputs * num_inputs
        gates = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
        ups = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
        for start in range(0, num_inputs, INPUTS):
            is_left, is_right = is_row[:, None], is_column[None, :]
            if not IS_WHOLE:
                is_input = start + depth < num_inputs
                is_left, is_right = is_left & is_input[None, :], is_right & is_input[:, None]
            left = tl.load(x_tile + start, mask=is_left, other=0.0)
            gate = tl.load(gate_tile + start, mask=is_right, other=0.0)
            up = tl.load(up_tile + start, mask=is_right, other=0.0)
            gates = tl.dot(left, gate, gates, input_precision=PRECISION)
            ups = tl.dot(left, up, ups, input_precision=PRECISION)
        result = gated(gates, ups, IS_SILU, output.dtype.element_ty)
        _store(output, place, is_row, column, is_column, num_outputs, result)


@triton.jit
def experts_kernel(
    output,
    x,
    weight,
    bias,
    pairs,
    tiles,
    num_outputs,
    num_inputs,
    num_column_tiles,
    x_stride,
    CHOSEN: tl.constexpr,
    IS_FIRST: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """IS_FIRST: products of tokens' rows, in the sorted order; else of rows in that order, at their pairs' places."""
    wait_for_inputs(IS_EARLY)
    tile = tiles + tl.program_id(0) // num_column_tiles * TILE_SIZE
    if tl.load(tile + 2) > 0:
        expert, place, is_row, pair = _rows(tile, pairs, ROWS)
        column = tl.program_id(0) % num_column_tiles * OUTPUTS + tl.arange(0, OUTPUTS)
        is_column = column < num_outputs
        depth = tl.arange(0, INPUTS)
        x_tile = x + (pair // CHOSEN if IS_FIRST else place)[:, None] * x_stride + depth[None, :]
        weight_tile = weight + expert * num_outputs * num_inputs + column[None, :] * num_inputs + depth[:, None]
        sums = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
        for start in range(0, num_inputs, INPUTS):
            is_left, is_right = is_row[:, None], is_column[None, :]
            if not IS_WHOLE:
                is_input = start + depth < num_inputs
                is_left, is_right = is_left & is_input[None, :], is_right & is_input[:, None]
            left = tl.load(x_tile + start, mask=is_left, other=0.0)
            right = tl.load(weight_tile + start, mask=is_right, other=0.0)
            sums = tl.dot(left, right, sums, input_precision=PRECISION)
        if HAS_BIAS:
            sums += _bias(bias, expert, column, is_column, num_outputs)
        _store(output, place if IS_FIRST else pair, is_row, column, is_column, num_outputs, sums)


@triton.jit
def scaled_experts_kernel(
    output,
    x,
    x_scales,
    weight,
    weight_scales,
    pairs,
    tiles,
    num_outputs,
    num_inputs,
    num_groups,
    num_column_tiles,
    CHOSEN: tl.constexpr,
    IS_FIRST: tl.constexpr,
    IS_GROUPED: tl.constexpr,
    HAS_BLOCKS: tl.constexpr,
    IS_INT: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """Products of bytes. IS_FIRST: see `experts_kernel`."""
    wait_for_inputs(IS_EARLY)
    tile = tiles + tl.program_id(0) // num_column_tiles * TILE_SIZE
    if tl.load(tile + 2) > 0:
        expert, place, is_row, pair = _rows(tile, pairs, ROWS)
        first_column = (tl.program_id(0) % num_column_tiles * OUTPUTS).to(tl.int64)
        column = first_column + tl.arange(0, OUTPUTS)
        is_column = column < num_outputs
        product = scaled_product(
            x,
            x_scales,
            pair // CHOSEN if IS_FIRST else place,
            is_row,
            weight + expert * num_outputs * num_inputs,
            weight_scales + expert * num_groups * num_outputs,
            first_column,
            column,
            is_column,
            0,
            num_inputs,
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
        _store(output, place if IS_FIRST else pair, is_row, column, is_column, num_outputs, product)


@triton.jit
def int4_experts_kernel(
    output,
    x,
    packed,
    scales,
    zeros,
    bias,
    pairs,
    tiles,
    num_outputs,
    num_inputs,
    num_groups,
    num_column_tiles,
    x_stride,
    CHOSEN: tl.constexpr,
    IS_FIRST: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    IS_OF_ONE_GROUP: tl.constexpr,
    SCALES_SUMS: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr,
    HAS_MINIMA: tl.constexpr,
    IS_FP4: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    HALF_TILE: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """Products with four bits a weight. IS_FIRST: see `experts_kernel`. IS_FP4: see `int4_product`."""
    wait_for_inputs(IS_EARLY)
    tile = tiles + tl.program_id(0) // num_column_tiles * TILE_SIZE
    if tl.load(tile + 2) > 0:
        expert, place, is_row, pair = _rows(tile, pairs, ROWS)
        column = tl.program_id(0) % num_column_tiles * OUTPUTS + tl.arange(0, OUTPUTS)
        is_column = column < num_outputs
        num_tiles = tl.cdiv(num_inputs, 2 * HALF_TILE)
        product = int4_product(
            x + (pair // CHOSEN if IS_FIRST else place) * x_stride,
            is_row,
            packed + expert * num_tiles * HALF_TILE * num_outputs,
            scales + expert * num_groups * num_outputs,
            zeros + expert * (1 if IS_FP4 and GROUP_SIZE < HALF_TILE else num_groups) * num_outputs,
            column,
            is_column,
            0,
            num_tiles,
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
            product += _bias(bias, expert, column, is_column, num_outputs)
        _store(output, place if IS_FIRST else pair, is_row, column, is_column, num_outputs, product)


@triton.jit
def _rows(tile, pairs, ROWS: tl.constexpr):
    """A tile's expert, and of its rows: their places among the sorted ones, which there are, and their pairs."""
    expert, first = tl.load(tile).to(tl.int64), tl.load(tile + 1)
    row = tl.arange(0, ROWS)
    is_row = row < tl.load(tile + 2)
    pair = tl.load(pairs + first + row, mask=is_row, other=0).to(tl.int64)
    return expert, (first + row).to(tl.int64), is_row, pair


@triton.jit
def _bias(bias, expert, column, is_column, num_outputs):
    return tl.load(bias + expert * num_outputs + column, mask=is_column, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _store(output, place, is_row, column, is_column, num_outputs, numbers):
    at = output + place[:, None] * num_outputs + column[None, :]
    tl.store(at, numbers.to(output.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit
def mix_rows_kernel(output, rows, shares, size, CHOSEN: tl.constexpr, COLUMNS: tl.constexpr, IS_EARLY: tl.constexpr):
    """One program is `COLUMNS` numbers of a token: its experts' rows, weighed and added in their order."""
    wait_for_inputs(IS_EARLY)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < size
    total = tl.zeros((COLUMNS,), dtype=tl.float32)
    # All loads are on their way before the first sum.
    for nth in tl.static_range(CHOSEN):
        row = tl.load(rows + (token * CHOSEN + nth) * size + column, mask=is_column, other=0.0).to(tl.float32)
        total += row * tl.load(shares + token * CHOSEN + nth)
    tl.store(output + token * size + column, total.to(output.dtype.element_ty), mask=is_column)
