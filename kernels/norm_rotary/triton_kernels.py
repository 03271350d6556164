"""RMSNorm and rotary positions on the GPU; numbers are float32 between loading and storing."""

import triton
import triton.language as tl

from ..linear.triton_kernels import quantize_groups
from ..triton_early_launch import wait_for_inputs


@triton.jit
def rms_norm_kernel(
    output,
    x,
    residual,
    weight,
    eps,
    size,
    x_stride,
    residual_stride,
    HAS_RESIDUAL: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """One program a row. With a residual, x is added to it in place and the sum is normalised."""
    wait_for_inputs(IS_EARLY)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED_SIZE)
    is_column = column < size
    wide = tl.load(x + row * x_stride + column, mask=is_column, other=0.0).to(tl.float32)
    # On its way while the sum is made.
    factors = tl.load(weight + column, mask=is_column, other=0.0)
    if HAS_RESIDUAL:
        stream = residual + row * residual_stride + column
        summed = (wide + tl.load(stream, mask=is_column, other=0.0).to(tl.float32)).to(residual.dtype.element_ty)
        tl.store(stream, summed, mask=is_column)
        wide = summed.to(tl.float32)
    scaled = wide * tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)
    # Rounded to the weight's type before it is weighted, as the reference and the models' own code do.
    weighted = scaled.to(factors.dtype).to(tl.float32) * factors.to(tl.float32)
    tl.store(output + row * size + column, weighted.to(output.dtype.element_ty), mask=is_column)


@triton.jit
def quantized_norm_kernel(
    values,
    scales,
    x,
    residual,
    weight,
    eps,
    size,
    group_size,
    num_groups,
    x_stride,
    residual_stride,
    LARGEST: tl.constexpr,
    IS_INT: tl.constexpr,
    GROUPS: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """As `rms_norm_kernel` with a residual, whose rows become bytes with a scale for each group of so many numbers.

    They are rounded to the model's type before, so that they are the same as in two steps.
    """
    wait_for_inputs(IS_EARLY)
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    place = tl.arange(0, PADDED_SIZE)[None, :]
    column = group[:, None] * group_size + place
    is_column = (place < group_size) & (column < size)
    wide = tl.load(x + row * x_stride + column, mask=is_column, other=0.0).to(tl.float32)
    factors = tl.load(weight + column, mask=is_column, other=0.0)
    stream = residual + row * residual_stride + column
    summed = (wide + tl.load(stream, mask=is_column, other=0.0).to(tl.float32)).to(residual.dtype.element_ty)
    tl.store(stream, summed, mask=is_column)
    wide = summed.to(tl.float32)
    scaled = wide * tl.rsqrt(tl.sum(tl.sum(wide * wide, 1), 0) / size + eps)
    weighted = scaled.to(factors.dtype).to(tl.float32) * factors.to(tl.float32)
    normed = weighted.to(residual.dtype.element_ty).to(tl.float32)
    quantized, scale = quantize_groups(normed, values.dtype.element_ty, LARGEST, IS_INT, GROUPS)
    tl.store(values + row * size + column, quantized, mask=is_column)
    tl.store(scales + row * num_groups + group, scale, mask=group < num_groups)


@triton.jit
def rotate_and_write_kernel(
    output,
    key_cache,
    value_cache,
    qkv,
    cos,
    sin,
    slots,
    query_norm,
    key_norm,
    eps,
    key_scale,
    value_scale,
    num_heads,
    num_kv_heads,
    qkv_stride,
    cache_block_stride,
    cache_slot_stride,
    cache_head_stride,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    REST: tl.constexpr,
    PADDED_REST: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    LARGEST_FP8: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """One program is a token and `HEADS` of its query, key and value heads, taken as two halves and the rest.

    LARGEST_FP8: the largest number that the caches have, 0 where they are not in FP8.
    """
    wait_for_inputs(IS_EARLY)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_head = head < num_heads + 2 * num_kv_heads
    is_query = head < num_heads
    is_value = head >= num_heads + num_kv_heads
    half = tl.arange(0, PADDED_HALF)
    is_half = half < HALF
    is_read = is_head[:, None] & is_half[None, :]

    heads = qkv + token * qkv_stride + head[:, None] * HEAD_DIM
    first = tl.load(heads + half[None, :], mask=is_read, other=0.0).to(tl.float32)
    second = tl.load(heads + HALF + half[None, :], mask=is_read, other=0.0).to(tl.float32)
    if REST:
        rest = 2 * HALF + tl.arange(0, PADDED_REST)
        is_rest = rest < HEAD_DIM
        unturned = tl.load(heads + rest[None, :], mask=is_head[:, None] & is_rest[None, :], other=0.0).to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        if REST:
            squares += tl.sum(unturned * unturned, 1)
        factor = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        first = _weighted(first, factor, is_query, is_value, query_norm, key_norm, half, is_half, output)
        second = _weighted(second, factor, is_query, is_value, query_norm, key_norm, HALF + half, is_half, output)
        if REST:
            unturned = _weighted(unturned, factor, is_query, is_value, query_norm, key_norm, rest, is_rest, output)

    # Values are not turned. Each head loads what all have: handed round it would go through shared memory.
    angle = tl.broadcast_to(token * HALF + half[None, :], [HEADS, PADDED_HALF])
    cosine = tl.load(cos + angle, mask=is_read, other=0.0).to(tl.float32)
    sine = tl.load(sin + angle, mask=is_read, other=0.0).to(tl.float32)
    turned_first = tl.where(is_value[:, None], first, first * cosine - second * sine).to(output.dtype.element_ty)
    turned_second = tl.where(is_value[:, None], second, second * cosine + first * sine).to(output.dtype.element_ty)

    # A padding token's slot is negative, and nothing of it is kept.
    slot = tl.load(slots + token)
    is_kept = slot >= 0
    place = slot // BLOCK_SIZE * cache_block_stride + slot % BLOCK_SIZE * cache_slot_stride
    queries = output + (token * num_heads + head[:, None]) * HEAD_DIM
    keys = key_cache + place + (head - num_heads)[:, None] * cache_head_stride
    values = value_cache + place + (head - num_heads - num_kv_heads)[:, None] * cache_head_stride
    is_key_write = (is_head & ~is_query & ~is_value & is_kept)[:, None]
    is_value_write = (is_head & is_value & is_kept)[:, None]
    tl.store(queries + half[None, :], turned_first, mask=is_query[:, None] & is_half[None, :])
    tl.store(queries + HALF + half[None, :], turned_second, mask=is_query[:, None] & is_half[None, :])
    cache_scale = tl.where(is_value, value_scale, key_scale)[:, None]
    first_stored = _as_stored(turned_first, cache_scale, key_cache, LARGEST_FP8)
    second_stored = _as_stored(turned_second, cache_scale, key_cache, LARGEST_FP8)
    tl.store(keys + half[None, :], first_stored, mask=is_key_write & is_half[None, :])
    tl.store(keys + HALF + half[None, :], second_stored, mask=is_key_write & is_half[None, :])
    tl.store(values + half[None, :], first_stored, mask=is_value_write & is_half[None, :])
    tl.store(values + HALF + half[None, :], second_stored, mask=is_value_write & is_half[None, :])
    if REST:
        kept = unturned.to(output.dtype.element_ty)
        tl.store(queries + rest[None, :], kept, mask=is_query[:, None] & is_rest[None, :])
        rest_stored = _as_stored(kept, cache_scale, key_cache, LARGEST_FP8)
        tl.store(keys + rest[None, :], rest_stored, mask=is_key_write & is_rest[None, :])
        tl.store(values + rest[None, :], rest_stored, mask=is_value_write & is_rest[None, :])


@triton.jit
def rotate_latents_kernel(
    queries,
    cache,
    turned,
    latents,
    norm,
    cos,
    sin,
    slots,
    eps,
    num_heads,
    query_token_stride,
    query_head_stride,
    turned_token_stride,
    turned_head_stride,
    latents_stride,
    cache_block_stride,
    cache_slot_stride,
    SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LARGEST_FP8: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """One program is a token and `HEADS` of its query heads, or the first one its latent and the key behind that."""
    wait_for_inputs(IS_EARLY)
    token = tl.program_id(0).to(tl.int64)
    half = tl.arange(0, PADDED_HALF)
    is_half = half < HALF
    cosine = tl.load(cos + token * HALF + half, mask=is_half, other=0.0).to(tl.float32)
    sine = tl.load(sin + token * HALF + half, mask=is_half, other=0.0).to(tl.float32)
    if tl.program_id(1) == 0:
        # A padding token's slot is negative, and nothing of it is kept.
        slot = tl.load(slots + token)
        is_kept = slot >= 0
        row = latents + token * latents_stride
        place = cache + slot // BLOCK_SIZE * cache_block_stride + slot % BLOCK_SIZE * cache_slot_stride
        column = tl.arange(0, PADDED_SIZE)
        is_column = column < SIZE
        wide = tl.load(row + column, mask=is_column, other=0.0).to(tl.float32)
        factors = tl.load(norm + column, mask=is_column, other=0.0)
        scaled = wide * tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
        weighted = scaled.to(factors.dtype).to(tl.float32) * factors.to(tl.float32)
        stored = _as_stored(weighted.to(queries.dtype.element_ty), 1.0, cache, LARGEST_FP8)
        tl.store(place + column, stored, mask=is_column & is_kept)
        first = tl.load(row + SIZE + half, mask=is_half, other=0.0).to(tl.float32)
        second = tl.load(row + SIZE + HALF + half, mask=is_half, other=0.0).to(tl.float32)
        turned_first = (first * cosine - second * sine).to(queries.dtype.element_ty)
        turned_second = (second * cosine + first * sine).to(queries.dtype.element_ty)
        key = place + SIZE + half
        tl.store(key, _as_stored(turned_first, 1.0, cache, LARGEST_FP8), mask=is_half & is_kept)
        tl.store(key + HALF, _as_stored(turned_second, 1.0, cache, LARGEST_FP8), mask=is_half & is_kept)
    else:
        head = (tl.program_id(1) - 1) * HEADS + tl.arange(0, HEADS)
        is_entry = (head < num_heads)[:, None] & is_half[None, :]
        heads = turned + token * turned_token_stride + head[:, None] * turned_head_stride + half[None, :]
        first_half = tl.load(heads, mask=is_entry, other=0.0).to(tl.float32)
        second_half = tl.load(heads + HALF, mask=is_entry, other=0.0).to(tl.float32)
        places = queries + token * query_token_stride + head[:, None] * query_head_stride + SIZE + half[None, :]
        new_first = first_half * cosine[None, :] - second_half * sine[None, :]
        new_second = second_half * cosine[None, :] + first_half * sine[None, :]
        tl.store(places, new_first.to(queries.dtype.element_ty), mask=is_entry)
        tl.store(places + HALF, new_second.to(queries.dtype.element_ty), mask=is_entry)


@triton.jit
def _as_stored(x, scale, cache, LARGEST_FP8: tl.constexpr):
    """What the cache holds of x: in FP8 the quotient by the scale, what it cannot reach as the largest it has."""
    if LARGEST_FP8:
        quotient = x.to(tl.float32) / scale
        # NaN stays NaN: it is how a row that went wrong is found.
        reached = tl.clamp(quotient, -1.0 * LARGEST_FP8, 1.0 * LARGEST_FP8, propagate_nan=tl.PropagateNan.ALL)
        x = _as_e5m2(reached) if cache.dtype.element_ty == tl.float8e5 else reached.to(cache.dtype.element_ty)
    return x


@triton.jit
def _as_e5m2(x):
    """To the nearest, ties to even. For GPUs before Ada Triton's own rounds ties away from zero, and NaN to -0."""
    bits = x.to(tl.uint32, bitcast=True)
    # The exponent's bias is 15 for 127, and of 23 bits after it two stay.
    normal = (((bits & 0x7FFFFFFF) + 0xFFFFF + ((bits >> 21) & 1)) >> 21) - (112 << 2)
    # What is smaller than any normal number is a multiple of 2**-16, which this sum ends with.
    subnormal = (tl.abs(x) + 192.0).to(tl.uint32, bitcast=True) & 7
    magnitude = tl.where(tl.abs(x) < 2.0**-14, subnormal, normal)
    magnitude = tl.where(x == x, magnitude, 0x7F)
    return (magnitude | (bits >> 24) & 0x80).to(tl.uint8).to(tl.float8e5, bitcast=True)


@triton.jit
def _weighted(x, factor, is_query, is_value, query_norm, key_norm, place, is_place, output):
    """Queries and keys normalised with their own weights, rounded as the reference rounds; values as they are.

    place: of x's columns in a head. Each head loads the weights that it wants, as it does its cosines and sines.
    """
    place = tl.broadcast_to(place[None, :], x.shape)
    query_weight = tl.load(query_norm + place, mask=is_query[:, None] & is_place[None, :], other=0.0)
    key_weight = tl.load(key_norm + place, mask=~(is_query | is_value)[:, None] & is_place[None, :], other=0.0)
    weight = tl.where(is_query[:, None], query_weight, key_weight)
    weighted = (x * factor).to(weight.dtype).to(tl.float32) * weight.to(tl.float32)
    return tl.where(is_value[:, None], x, weighted.to(output.dtype.element_ty).to(tl.float32))
