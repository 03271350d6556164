"""The GPU's attention: one kernel over a list of work items, and one that merges the parts of split queries.

Both run on a grid of fixed size and read from device memory how much there is to do, so that a captured launch serves
any mix of prefill chunks, decodes and shared prefixes. `plan.ITEM_FIELDS` says what an item holds.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
ITEM_SIZE = tl.constexpr(8)


@triton.jit
def attend_kernel(
    output,
    lse,
    partial_output,
    partial_lse,
    query,
    key_cache,
    value_cache,
    items,
    num_items,
    query_tokens,
    blocks,
    scale,
    value_scale,
    soft_cap,
    sliding_window,
    num_kv_heads,
    query_token_stride,
    query_head_stride,
    output_token_stride,
    output_head_stride,
    cache_block_stride,
    cache_slot_stride,
    cache_head_stride,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_LSE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One unit is an item and a KV head. A unit's rows are its queries times the query heads of its KV head."""
    num_heads = num_kv_heads * GROUP
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, PADDED_DIM)
    is_dim = dim < HEAD_DIM
    # Neighbouring units read neighbouring heads of the same keys.
    for unit in range(tl.program_id(0), tl.load(num_items) * num_kv_heads, tl.num_programs(0)):
        item = items + unit // num_kv_heads * ITEM_SIZE
        kv_head = unit % num_kv_heads
        first_query = tl.load(item)
        num_queries = tl.load(item + 1)
        table = blocks + tl.load(item + 2)
        kv_begin = tl.load(item + 3)
        kv_end = tl.load(item + 4)
        first_position = tl.load(item + 5)
        is_final = tl.load(item + 6)
        first_partial = tl.load(item + 7)

        nth_query = row // GROUP
        head = kv_head * GROUP + row % GROUP
        is_row = nth_query < num_queries
        token = tl.load(query_tokens + first_query + nth_query, mask=is_row, other=0).to(tl.int64)
        is_entry = is_row[:, None] & is_dim[None, :]
        queries = tl.load(
            query + token[:, None] * query_token_stride + head[:, None] * query_head_stride + dim[None, :],
            mask=is_entry,
            other=0.0,
        )
        position = first_position + nth_query
        keys = key_cache + kv_head * cache_head_stride
        values = value_cache + kv_head * cache_head_stride

        highest = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        weighted = tl.zeros([ROWS, PADDED_DIM], tl.float32)
        # Tiles that every row sees whole come first and need no mask; under a window all are masked.
        num_whole = 0 if HAS_WINDOW else tl.maximum(0, tl.minimum(kv_end, first_position + 1) - kv_begin) // TILE
        masked_begin = kv_begin + num_whole * TILE
        for start in range(kv_begin, masked_begin, TILE):
            highest, total, weighted = _attend_tile(
                highest, total, weighted, queries, position, keys, values, table, start, kv_end,
                scale, soft_cap, sliding_window, cache_block_stride, cache_slot_stride, dim, is_dim,
                BLOCK_SIZE, TILE, False, HAS_WINDOW, HAS_SOFT_CAP, PRECISION,
            )  # fmt: skip
        for start in range(masked_begin, kv_end, TILE):
            highest, total, weighted = _attend_tile(
                highest, total, weighted, queries, position, keys, values, table, start, kv_end,
                scale, soft_cap, sliding_window, cache_block_stride, cache_slot_stride, dim, is_dim,
                BLOCK_SIZE, TILE, True, HAS_WINDOW, HAS_SOFT_CAP, PRECISION,
            )  # fmt: skip

        # A row that saw no key has an output of zero and a log-sum-exp of -inf, and so no weight in a merge.
        divisor = tl.where(total > 0, total, 1.0)
        attended = weighted / divisor[:, None] * value_scale
        row_lse = highest * LN_2 + tl.log(divisor)
        if is_final:
            at = output + token[:, None] * output_token_stride + head[:, None] * output_head_stride + dim[None, :]
            tl.store(at, attended.to(output.dtype.element_ty), mask=is_entry)
            if HAS_LSE:
                tl.store(lse + token * num_heads + head, row_lse, mask=is_row)
        else:
            part = (first_partial + nth_query).to(tl.int64) * num_heads + head
            tl.store(partial_output + part[:, None] * HEAD_DIM + dim[None, :], attended, mask=is_entry)
            tl.store(partial_lse + part, row_lse, mask=is_row)


@triton.jit
def _attend_tile(
    highest,
    total,
    weighted,
    queries,
    position,
    keys,
    values,
    table,
    start,
    kv_end,
    scale,
    soft_cap,
    sliding_window,
    cache_block_stride,
    cache_slot_stride,
    dim,
    is_dim,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    IS_MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The running softmax (in powers of two) after `TILE` more keys, from `start` on."""
    key = start + tl.arange(0, TILE)
    is_key = key < kv_end
    if IS_MASKED:
        block = tl.load(table + key // BLOCK_SIZE, mask=is_key, other=0)
    else:
        block = tl.load(table + key // BLOCK_SIZE)
    slot = block.to(tl.int64) * cache_block_stride + (key % BLOCK_SIZE) * cache_slot_stride
    # Beyond the end lies what nobody wrote: it is read as zero, since zero weight times NaN would be NaN.
    is_read = is_key[:, None] & is_dim[None, :] if IS_MASKED else is_dim[None, :]
    # A cache in FP8 is widened to the queries' dtype, which has all its numbers.
    tile_keys = tl.load(keys + slot[:, None] + dim[None, :], mask=is_read, other=0.0).to(queries.dtype)
    scores = tl.dot(queries, tl.trans(tile_keys), input_precision=PRECISION) * scale
    if HAS_SOFT_CAP:
        scores = soft_cap * _tanh(scores / soft_cap)
    scores = scores * LOG2_E
    if IS_MASKED:
        is_seen = is_key[None, :] & (key[None, :] <= position[:, None])
        if HAS_WINDOW:
            is_seen = is_seen & (key[None, :] > position[:, None] - sliding_window)
        scores = tl.where(is_seen, scores, float("-inf"))
    new_highest = tl.maximum(highest, tl.max(scores, 1))
    # While a row has seen nothing its highest is -inf, and -inf less -inf would be NaN.
    base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
    weights = tl.exp2(scores - base[:, None])
    decay = tl.exp2(highest - base)
    total = total * decay + tl.sum(weights, 1)
    tile_values = tl.load(values + slot[:, None] + dim[None, :], mask=is_read, other=0.0).to(queries.dtype)
    weighted = weighted * decay[:, None]
    weighted = tl.dot(weights.to(tile_values.dtype), tile_values, weighted, input_precision=PRECISION)
    return new_highest, total, weighted


@triton.jit
def _tanh(x):
    decay = tl.exp(-2.0 * tl.abs(x))
    return tl.where(x < 0, -1.0, 1.0) * (1.0 - decay) / (1.0 + decay)


@triton.jit
def merge_kernel(
    output,
    lse,
    partial_output,
    partial_lse,
    merge_tokens,
    merge_starts,
    merge_rows,
    num_merges,
    num_heads,
    output_token_stride,
    output_head_stride,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    """One unit is a token and `HEADS` of its heads: their parts' outputs, weighted by e to their log-sum-exps."""
    dim = tl.arange(0, PADDED_DIM)
    chunks = tl.cdiv(num_heads, HEADS)
    for unit in range(tl.program_id(0), tl.load(num_merges) * chunks, tl.num_programs(0)):
        merge = unit // chunks
        head = unit % chunks * HEADS + tl.arange(0, HEADS)
        is_head = head < num_heads
        is_entry = is_head[:, None] & (dim < HEAD_DIM)[None, :]
        highest = tl.full([HEADS], float("-inf"), tl.float32)
        total = tl.zeros([HEADS], tl.float32)
        weighted = tl.zeros([HEADS, PADDED_DIM], tl.float32)
        for index in range(tl.load(merge_starts + merge), tl.load(merge_starts + merge + 1)):
            part = tl.load(merge_rows + index).to(tl.int64) * num_heads + head
            part_lse = tl.load(partial_lse + part, mask=is_head, other=float("-inf"))
            attended = tl.load(partial_output + part[:, None] * HEAD_DIM + dim[None, :], mask=is_entry, other=0.0)
            new_highest = tl.maximum(highest, part_lse)
            base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
            weight = tl.exp(part_lse - base)
            decay = tl.exp(highest - base)
            total = total * decay + weight
            weighted = weighted * decay[:, None] + attended * weight[:, None]
            highest = new_highest
        token = tl.load(merge_tokens + merge).to(tl.int64)
        at = output + token * output_token_stride + head[:, None] * output_head_stride + dim[None, :]
        divisor = tl.where(total > 0, total, 1.0)
        tl.store(at, (weighted / divisor[:, None]).to(output.dtype.element_ty), mask=is_entry)
        if HAS_LSE:
            tl.store(lse + token * num_heads + head, highest + tl.log(divisor), mask=is_head)
