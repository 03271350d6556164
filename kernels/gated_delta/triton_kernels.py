"""Gated DeltaNet on the GPU; numbers are float32 between loading and storing, factors of products excepted."""

import triton
import triton.language as tl

from ..recurrent_states.triton_kernels import TILE_SIZE, sequence_of, softplus
from ..triton_early_launch import wait_for_inputs

# What `chunk_kernel` says of each token: factors of what its key and its query find in the state with which the chunk
# began, of what is left, when the chunk ends, of what it writes, and how much is left of that state after it.
KNOWN, READ, KEPT, LEFT = (tl.constexpr(kind) for kind in range(4))
# The part of a triangular system that is solved row by row.
BLOCK = tl.constexpr(16)


@triton.jit
def recurrent_rule_kernel(
    output,
    states,
    mixed,
    decay,
    beta,
    decay_scale,
    decay_bias,
    sequences,
    scale,
    num_heads,
    mixed_stride,
    decay_stride,
    beta_stride,
    HEADS_PER_KEY: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PADDED_KEY_DIM: tl.constexpr,
    VALUES: tl.constexpr,
    DOUBLES_BETA: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """One program is a sequence of few tokens, a head and `VALUES` columns of its state, which stays in registers."""
    wait_for_inputs(IS_EARLY)
    start, length, read, write = sequence_of(sequences, tl.program_id(1))
    if length > 0:
        head, key, is_key, value, is_value = _part(VALUE_DIM, KEY_DIM, PADDED_KEY_DIM, VALUES)
        is_state = is_key[:, None] & is_value[None, :]
        part = _state(head, key, value, KEY_DIM, VALUE_DIM)
        head_size: tl.constexpr = KEY_DIM * VALUE_DIM
        state = tl.load(states + read * num_heads * head_size + part, mask=is_state, other=0.0)
        keys_begin = num_heads // HEADS_PER_KEY * KEY_DIM
        key_place = head // HEADS_PER_KEY * KEY_DIM + key
        value_place = 2 * keys_begin + head * VALUE_DIM + value
        for nth in range(length):
            token = start + nth
            row = mixed + token * mixed_stride
            query_row = tl.load(row + key_place, mask=is_key, other=0.0).to(tl.float32)
            key_row = tl.load(row + keys_begin + key_place, mask=is_key, other=0.0).to(tl.float32)
            value_row = tl.load(row + value_place, mask=is_value, other=0.0).to(tl.float32)
            rate = _rate(tl.load(decay + token * decay_stride + head), head, decay_scale, decay_bias)
            written = tl.sigmoid(tl.load(beta + token * beta_stride + head).to(tl.float32))
            if DOUBLES_BETA:
                written *= 2
            query_row *= tl.rsqrt(tl.sum(query_row * query_row, 0) + 1e-6) * scale
            key_row *= tl.rsqrt(tl.sum(key_row * key_row, 0) + 1e-6)
            state *= tl.exp(rate)
            change = written * (value_row - tl.sum(state * key_row[:, None], 0))
            state += key_row[:, None] * change[None, :]
            result = tl.sum(state * query_row[:, None], 0).to(output.dtype.element_ty)
            tl.store(output + (token * num_heads + head) * VALUE_DIM + value, result, mask=is_value)
        tl.store(states + write * num_heads * head_size + part, state, mask=is_state)


@triton.jit
def chunk_kernel(
    factors,
    matrices,
    mixed,
    decay,
    beta,
    decay_scale,
    decay_bias,
    sequences,
    chunks,
    scale,
    num_tokens,
    num_heads,
    mixed_stride,
    decay_stride,
    beta_stride,
    HEADS_PER_KEY: tl.constexpr,
    KEY_DIM: tl.constexpr,
    PADDED_KEY_DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    DOUBLES_BETA: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """What `scan_kernel` has to know of a chunk's tokens, whatever the state is; one program is a chunk and a head.

    What a token writes depends on what those before it do: a triangular system (arXiv 2412.06464, section 3.3). Keys
    and queries are multiplied as they are stored, and their products scaled: they are not rounded before.
    """
    wait_for_inputs(IS_EARLY)
    chunk = chunks + tl.program_id(0) * TILE_SIZE
    head = tl.program_id(1)
    start, length, _, _ = sequence_of(sequences, tl.load(chunk))
    first = tl.load(chunk + 1)
    nth, key = tl.arange(0, TOKENS), tl.arange(0, PADDED_KEY_DIM)
    token = start + first + nth
    is_token = first + nth < length
    row = mixed + token[:, None] * mixed_stride + (head // HEADS_PER_KEY * KEY_DIM + key)[None, :]
    is_wanted = is_token[:, None] & (key < KEY_DIM)[None, :]
    queries = tl.load(row, mask=is_wanted, other=0.0)
    keys = tl.load(row + num_heads // HEADS_PER_KEY * KEY_DIM, mask=is_wanted, other=0.0)
    decays = tl.load(decay + token * decay_stride + head, mask=is_token, other=0.0)
    rates = tl.where(is_token, _rate(decays, head, decay_scale, decay_bias), 0.0)
    written = tl.sigmoid(tl.load(beta + token * beta_stride + head, mask=is_token, other=0.0).to(tl.float32))
    if DOUBLES_BETA:
        written *= 2
    query_scale, key_scale = _inverse_length(queries) * scale, _inverse_length(keys)
    # Logarithms of what is left, at a token, of what the chunk began with.
    left, all_left = tl.cumsum(rates, 0), tl.sum(rates, 0)
    factor, kind_size = factors + head * num_tokens + token, num_heads * num_tokens
    tl.store(factor + KNOWN * kind_size, key_scale * tl.exp(left), mask=is_token)
    tl.store(factor + READ * kind_size, query_scale * tl.exp(left), mask=is_token)
    tl.store(factor + KEPT * kind_size, key_scale * tl.exp(all_left - left), mask=is_token)
    tl.store(factor + LEFT * kind_size, tl.exp(left), mask=is_token)
    is_later, is_not_earlier = nth[:, None] > nth[None, :], nth[:, None] >= nth[None, :]
    between = tl.exp(tl.where(is_not_earlier, left[:, None] - left[None, :], -float("inf"))) * key_scale[None, :]
    dtype: tl.constexpr = mixed.dtype.element_ty
    attention = tl.dot(queries, tl.trans(keys)) * between * query_scale[:, None]
    matrix = matrices + ((num_tokens + token) * num_heads + head)[:, None] * TOKENS + nth[None, :]
    tl.store(matrix, attention.to(dtype), mask=is_token[:, None])
    alike = tl.dot(keys, tl.trans(keys)) * between * (written * key_scale)[:, None]
    inverse = _inverse(tl.where(is_later, alike, 0.0), dtype, TOKENS) * written[None, :]
    matrix = matrices + (token * num_heads + head)[:, None] * TOKENS + nth[None, :]
    tl.store(matrix, inverse.to(dtype), mask=is_token[:, None])


@triton.jit
def _inverse(system, dtype: tl.constexpr, TOKENS: tl.constexpr):
    """Of 1 + a strictly lower triangular system, by forward substitution.

    Within blocks on the diagonal row by row, all blocks at once; then block by block.
    """
    blocks: tl.constexpr = TOKENS // BLOCK
    apart = tl.reshape(system, (blocks, BLOCK, blocks, BLOCK))
    block = tl.arange(0, blocks)
    is_diagonal = block[:, None, None, None] == block[None, None, :, None]
    own = tl.sum(tl.where(is_diagonal, apart, 0.0), 2)
    row, column = tl.arange(0, BLOCK)[None, :, None], tl.arange(0, BLOCK)[None, None, :]
    inverse = tl.where(row == column, 1.0, tl.zeros((blocks, BLOCK, BLOCK), dtype=tl.float32))
    for nth in range(1, BLOCK):
        factors = tl.sum(tl.where(row == nth, own, 0.0), 1)
        found = tl.sum(factors[:, :, None] * inverse, 1)
        inverse = tl.where(row == nth, inverse - found[:, None, :], inverse)
    begin = tl.reshape(tl.where(is_diagonal, inverse[:, :, None, :], 0.0), (TOKENS, TOKENS))
    others = tl.reshape(tl.where(is_diagonal, 0.0, apart), (TOKENS, TOKENS))
    others = tl.dot(begin.to(dtype), others.to(dtype)).to(dtype)
    result = begin
    # Each time one block of rows more is right.
    for _ in tl.static_range(blocks - 1):
        result = begin - tl.dot(others, result.to(dtype))
    return result


@triton.jit
def scan_kernel(
    output,
    states,
    mixed,
    factors,
    matrices,
    sequences,
    num_tokens,
    num_heads,
    mixed_stride,
    HEADS_PER_KEY: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PADDED_KEY_DIM: tl.constexpr,
    VALUES: tl.constexpr,
    TOKENS: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """One program is a sequence, a head and `VALUES` columns of its state, chunk by chunk."""
    wait_for_inputs(IS_EARLY)
    start, length, read, write = sequence_of(sequences, tl.program_id(1))
    head, key, is_key, value, is_value = _part(VALUE_DIM, KEY_DIM, PADDED_KEY_DIM, VALUES)
    is_state = is_key[:, None] & is_value[None, :]
    part = _state(head, key, value, KEY_DIM, VALUE_DIM)
    head_size: tl.constexpr = KEY_DIM * VALUE_DIM
    dtype: tl.constexpr = mixed.dtype.element_ty
    state = tl.load(states + read * num_heads * head_size + part, mask=is_state, other=0.0)
    keys_begin = num_heads // HEADS_PER_KEY * KEY_DIM
    nth = tl.arange(0, TOKENS)
    query_place = head // HEADS_PER_KEY * KEY_DIM + key
    value_place = 2 * keys_begin + head * VALUE_DIM + value
    factor, kind_size = factors + head * num_tokens, num_heads * num_tokens
    for first in range(0, length, TOKENS):
        token = start + first + nth
        is_token = first + nth < length
        is_key_there = is_token[:, None] & is_key[None, :]
        is_value_there = is_token[:, None] & is_value[None, :]
        row = mixed + token[:, None] * mixed_stride
        queries = tl.load(row + query_place[None, :], mask=is_key_there, other=0.0)
        keys = tl.load(row + (keys_begin + query_place)[None, :], mask=is_key_there, other=0.0)
        values = tl.load(row + value_place[None, :], mask=is_value_there, other=0.0).to(tl.float32)
        matrix = matrices + (token * num_heads + head)[:, None] * TOKENS + nth[None, :]
        inverse = tl.load(matrix, mask=is_token[:, None], other=0.0)
        matrix = matrices + ((num_tokens + token) * num_heads + head)[:, None] * TOKENS + nth[None, :]
        attention = tl.load(matrix, mask=is_token[:, None], other=0.0)
        known_factor = tl.load(factor + KNOWN * kind_size + token, mask=is_token, other=0.0)
        read_factor = tl.load(factor + READ * kind_size + token, mask=is_token, other=0.0)
        kept_factor = tl.load(factor + KEPT * kind_size + token, mask=is_token, other=0.0)
        left = tl.load(factor + LEFT * kind_size + start + tl.minimum(first + TOKENS, length) - 1)
        rounded = state.to(dtype)
        rest = values - tl.dot(keys, rounded) * known_factor[:, None]
        change = tl.dot(inverse, rest.to(dtype))
        result = tl.dot(queries, rounded) * read_factor[:, None]
        result = tl.dot(attention, change.to(dtype), result)
        place = output + (token * num_heads + head)[:, None] * VALUE_DIM + value[None, :]
        tl.store(place, result.to(output.dtype.element_ty), mask=is_value_there)
        state = tl.dot(tl.trans(keys), (change * kept_factor[:, None]).to(dtype), state * left)
    tl.store(states + write * num_heads * head_size + part, state, mask=is_state)


@triton.jit
def _part(VALUE_DIM: tl.constexpr, KEY_DIM: tl.constexpr, PADDED_KEY_DIM: tl.constexpr, VALUES: tl.constexpr):
    """The program's head, and the rows and columns of its state, with which there are."""
    parts: tl.constexpr = (VALUE_DIM + VALUES - 1) // VALUES
    key = tl.arange(0, PADDED_KEY_DIM)
    value = tl.program_id(0) % parts * VALUES + tl.arange(0, VALUES)
    return tl.program_id(0) // parts, key, key < KEY_DIM, value, value < VALUE_DIM


@triton.jit
def _state(head, key, value, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr):
    """Where these rows and columns are within a slot."""
    return (head * KEY_DIM + key)[:, None] * VALUE_DIM + value[None, :]


@triton.jit
def _inverse_length(rows):
    wide = rows.to(tl.float32)
    return tl.rsqrt(tl.sum(wide * wide, 1) + 1e-6)


@triton.jit
def _rate(decay, head, decay_scale, decay_bias):
    """The logarithm of what a token leaves of the state: -e^decay_scale · softplus(decay + decay_bias)."""
    return -tl.exp(tl.load(decay_scale + head)) * softplus(decay.to(tl.float32) + tl.load(decay_bias + head))


@triton.jit
def gated_rms_norm_kernel(
    output,
    x,
    gate,
    weight,
    eps,
    num_rows,
    num_heads,
    gate_stride,
    SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """One program is `ROWS` heads, of one token or of several."""
    wait_for_inputs(IS_EARLY)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, PADDED_SIZE)[None, :]
    is_wanted = (row < num_rows)[:, None] & (column < SIZE)
    wide = tl.load(x + row[:, None] * SIZE + column, mask=is_wanted, other=0.0).to(tl.float32)
    gate_row = row // num_heads * gate_stride + row % num_heads * SIZE
    gates = tl.load(gate + gate_row[:, None] + column, mask=is_wanted, other=0.0).to(tl.float32)
    factors = tl.load(weight + column, mask=column < SIZE, other=0.0)
    scaled = wide * tl.rsqrt(tl.sum(wide * wide, 1) / SIZE + eps)[:, None]
    # Rounded before it is weighted, and before it is gated, as the reference and the models' own code do.
    weighted = (scaled.to(factors.dtype).to(tl.float32) * factors.to(tl.float32)).to(x.dtype.element_ty)
    result = weighted.to(tl.float32) * gates * tl.sigmoid(gates)
    tl.store(output + row[:, None] * SIZE + column, result.to(output.dtype.element_ty), mask=is_wanted)
