"""Mamba-2 on the GPU; numbers are float32 between loading and storing, factors of products excepted."""

import triton
import triton.language as tl

from ..recurrent_states.triton_kernels import TILE_SIZE, sequence_of, softplus
from ..triton_early_launch import wait_for_inputs


@triton.jit
def recurrent_scan_kernel(
    output,
    states,
    mixed,
    dt,
    decay_scale,
    dt_bias,
    skip,
    sequences,
    least_step,
    greatest_step,
    num_heads,
    mixed_stride,
    dt_stride,
    HEADS_PER_GROUP: tl.constexpr,
    STATE_DIM: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_STATE_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """One program is a sequence of few tokens, a head and `COLUMNS` columns of its state, which stays in registers."""
    wait_for_inputs(IS_EARLY)
    start, length, read, write = sequence_of(sequences, tl.program_id(1))
    if length > 0:
        head, row, is_row, column, is_column = _part(HEAD_DIM, STATE_DIM, PADDED_STATE_DIM, COLUMNS)
        is_state = is_row[:, None] & is_column[None, :]
        part = (head * STATE_DIM + row)[:, None] * HEAD_DIM + column[None, :]
        head_size: tl.constexpr = STATE_DIM * HEAD_DIM
        state = tl.load(states + read * num_heads * head_size + part, mask=is_state, other=0.0)
        input_place = head * HEAD_DIM + column
        into_place = num_heads * HEAD_DIM + head // HEADS_PER_GROUP * STATE_DIM + row
        group_size = num_heads // HEADS_PER_GROUP * STATE_DIM
        rate, bias = -tl.exp(tl.load(decay_scale + head)), tl.load(dt_bias + head)
        skipped = tl.load(skip + head)
        for nth in range(length):
            token = start + nth
            tokens = mixed + token * mixed_stride
            x = tl.load(tokens + input_place, mask=is_column, other=0.0).to(tl.float32)
            into = tl.load(tokens + into_place, mask=is_row, other=0.0).to(tl.float32)
            out_of = tl.load(tokens + group_size + into_place, mask=is_row, other=0.0).to(tl.float32)
            step = _step(tl.load(dt + token * dt_stride + head), bias, least_step, greatest_step)
            state = state * tl.exp(rate * step) + into[:, None] * (x * step)[None, :]
            result = tl.sum(state * out_of[:, None], 0) + skipped * x
            place = output + (token * num_heads + head) * HEAD_DIM + column
            tl.store(place, result.to(output.dtype.element_ty), mask=is_column)
        tl.store(states + write * num_heads * head_size + part, state, mask=is_state)


@triton.jit
def group_products_kernel(
    products,
    mixed,
    sequences,
    chunks,
    inputs_size,
    num_groups,
    mixed_stride,
    STATE_DIM: tl.constexpr,
    PADDED_STATE_DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """Of each token's C with the B of each of its chunk's tokens, for all heads of a group; a program is both."""
    wait_for_inputs(IS_EARLY)
    chunk = chunks + tl.program_id(0) * TILE_SIZE
    group = tl.program_id(1)
    start, length, _, _ = sequence_of(sequences, tl.load(chunk))
    first = tl.load(chunk + 1)
    nth, row = tl.arange(0, TOKENS), tl.arange(0, PADDED_STATE_DIM)
    token = start + first + nth
    is_token = first + nth < length
    is_wanted = is_token[:, None] & (row < STATE_DIM)[None, :]
    place = mixed + token[:, None] * mixed_stride + (inputs_size + group * STATE_DIM + row)[None, :]
    into = tl.load(place, mask=is_wanted, other=0.0)
    out_of = tl.load(place + num_groups * STATE_DIM, mask=is_wanted, other=0.0)
    product = tl.dot(out_of, tl.trans(into))
    place = products + (token * num_groups + group)[:, None] * TOKENS + nth[None, :]
    tl.store(place, product.to(products.dtype.element_ty), mask=is_token[:, None])


@triton.jit
def chunked_scan_kernel(
    output,
    states,
    mixed,
    dt,
    decay_scale,
    dt_bias,
    skip,
    products,
    sequences,
    least_step,
    greatest_step,
    num_heads,
    mixed_stride,
    dt_stride,
    HEADS_PER_GROUP: tl.constexpr,
    STATE_DIM: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_STATE_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """One program is a sequence, a head and `COLUMNS` columns of its state, chunk by chunk (arXiv 2405.21060)."""
    wait_for_inputs(IS_EARLY)
    start, length, read, write = sequence_of(sequences, tl.program_id(1))
    head, row, is_row, column, is_column = _part(HEAD_DIM, STATE_DIM, PADDED_STATE_DIM, COLUMNS)
    is_state = is_row[:, None] & is_column[None, :]
    part = (head * STATE_DIM + row)[:, None] * HEAD_DIM + column[None, :]
    head_size: tl.constexpr = STATE_DIM * HEAD_DIM
    dtype: tl.constexpr = mixed.dtype.element_ty
    state = tl.load(states + read * num_heads * head_size + part, mask=is_state, other=0.0)
    group, num_groups = head // HEADS_PER_GROUP, num_heads // HEADS_PER_GROUP
    input_place = head * HEAD_DIM + column
    into_place = num_heads * HEAD_DIM + group * STATE_DIM + row
    rate, bias = -tl.exp(tl.load(decay_scale + head)), tl.load(dt_bias + head)
    skipped = tl.load(skip + head)
    nth = tl.arange(0, TOKENS)
    is_not_earlier = nth[:, None] >= nth[None, :]
    for first in range(0, length, TOKENS):
        token = start + first + nth
        is_token = first + nth < length
        is_row_there = is_token[:, None] & is_row[None, :]
        is_input = is_token[:, None] & is_column[None, :]
        tokens = mixed + token[:, None] * mixed_stride
        x = tl.load(tokens + input_place[None, :], mask=is_input, other=0.0)
        into = tl.load(tokens + into_place[None, :], mask=is_row_there, other=0.0)
        out_of = tl.load(tokens + (num_groups * STATE_DIM + into_place)[None, :], mask=is_row_there, other=0.0)
        place = products + (token * num_groups + group)[:, None] * TOKENS + nth[None, :]
        product = tl.load(place, mask=is_token[:, None], other=0.0).to(tl.float32)
        given = tl.load(dt + token * dt_stride + head, mask=is_token, other=0.0)
        step = tl.where(is_token, _step(given, bias, least_step, greatest_step), 0.0)
        # Logarithms of what is left, at a token, of what the chunk began with.
        left, all_left = tl.cumsum(rate * step, 0), tl.sum(rate * step, 0)
        between = tl.exp(tl.where(is_not_earlier, left[:, None] - left[None, :], -float("inf")))
        result = tl.dot(out_of, state.to(dtype)) * tl.exp(left)[:, None]
        result = tl.dot((product * between * step[None, :]).to(dtype), x, result)
        wide = x.to(tl.float32)
        place = output + (token * num_heads + head)[:, None] * HEAD_DIM + column[None, :]
        tl.store(place, (result + skipped * wide).to(output.dtype.element_ty), mask=is_input)
        written = wide * (step * tl.exp(all_left - left))[:, None]
        state = tl.dot(tl.trans(into), written.to(dtype), state * tl.exp(all_left))
    tl.store(states + write * num_heads * head_size + part, state, mask=is_state)


@triton.jit
def _part(HEAD_DIM: tl.constexpr, STATE_DIM: tl.constexpr, PADDED_STATE_DIM: tl.constexpr, COLUMNS: tl.constexpr):
    """The program's head, and the rows and columns of its state, with which there are."""
    parts: tl.constexpr = (HEAD_DIM + COLUMNS - 1) // COLUMNS
    row = tl.arange(0, PADDED_STATE_DIM)
    column = tl.program_id(0) % parts * COLUMNS + tl.arange(0, COLUMNS)
    return tl.program_id(0) // parts, row, row < STATE_DIM, column, column < HEAD_DIM


@triton.jit
def _step(dt, bias, least, greatest):
    """How much time a token takes."""
    return tl.minimum(tl.maximum(softplus(dt.to(tl.float32) + bias), least), greatest)


@triton.jit
def grouped_gated_norm_kernel(
    output,
    x,
    gate,
    weight,
    eps,
    num_rows,
    num_groups,
    gate_stride,
    SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """One program is `ROWS` groups, of one token or of several; a row is a token's group."""
    wait_for_inputs(IS_EARLY)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, PADDED_SIZE)[None, :]
    is_wanted = (row < num_rows)[:, None] & (column < SIZE)
    wide = tl.load(x + row[:, None] * SIZE + column, mask=is_wanted, other=0.0).to(tl.float32)
    group_place = (row % num_groups * SIZE)[:, None] + column
    place = gate + (row // num_groups * gate_stride)[:, None] + group_place
    gates = tl.load(place, mask=is_wanted, other=0.0).to(tl.float32)
    factors = tl.load(weight + group_place, mask=is_wanted, other=0.0).to(tl.float32)
    gated = wide * gates * tl.sigmoid(gates)
    result = gated * tl.rsqrt(tl.sum(gated * gated, 1) / SIZE + eps)[:, None] * factors
    tl.store(output + row[:, None] * SIZE + column, result.to(output.dtype.element_ty), mask=is_wanted)
