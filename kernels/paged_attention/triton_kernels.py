"""The GPU's attention: one kernel over a list of work items, and one that merges the parts of split queries.

Both run on a grid of fixed size and read from device memory how much there is to do, so that a captured launch serves
any mix of prefill chunks, decodes and shared prefixes. `plan.ITEM_FIELDS` says what an item holds.
"""

import triton
import triton.language as tl

from ..triton_early_launch import let_next_begin, wait_at_end, wait_for_inputs

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
ITEM_SIZE = tl.constexpr(8)


@triton.jit
def attend_kernel(
    output,
    lse,
    partial_output,
    partial_lse,
    sinks,
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
    KEY_REST: tl.constexpr,
    PADDED_REST: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    HAS_WHOLE: tl.constexpr,
    IS_PAIRED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_LSE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
    FOLLOWS_WIDE: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """One unit is an item and a KV head. A unit's rows are its queries times the query heads of its KV head.

    `HAS_WHOLE`: tiles that every row sees whole have a loop of their own, without masks; not worth its start where
    there are few. `IS_PAIRED`: values are of 8 bits, and read two at a time. `KEY_REST`: keys have so many numbers
    behind those that are their values too; 0: values are others. `FOLLOWS_WIDE`: the kernel before this one attends to
    other items of the same plan.
    """
    if FOLLOWS_WIDE:
        let_next_begin(IS_EARLY)
    else:
        wait_for_inputs(IS_EARLY)
    num_heads = num_kv_heads * GROUP
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, PADDED_DIM)
    is_dim = dim < HEAD_DIM
    program, num_programs, num_units = tl.program_id(0), tl.num_programs(0), tl.load(num_items) * num_kv_heads
    for nth_unit in range(program, num_units, num_programs):
        # Units become shorter from one to the next: who had a round's longest gets the shortest of the one after it.
        # Neighbouring units read neighbouring heads of the same keys.
        round_begin = nth_unit - program
        mirrored = tl.minimum(round_begin + num_programs, num_units) - 1 - program
        unit = tl.where(round_begin // num_programs % 2 == 0, nth_unit, mirrored)
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
        if key_cache.dtype.element_ty.is_fp8() and queries.dtype == tl.bfloat16:
            # Two FP8 numbers become float16 in one instruction, which has all of them; no query is too large for it.
            queries = tl.clamp(queries.to(tl.float32), -65504.0, 65504.0).to(tl.float16)
        position = first_position + nth_query
        keys = key_cache + kv_head * cache_head_stride
        values = value_cache + kv_head * cache_head_stride

        # Tiles begin where a block does (a window need not), so that a key's place in its block is worked out once.
        begin = kv_begin // min(BLOCK_SIZE, TILE) * min(BLOCK_SIZE, TILE)
        nth = tl.arange(0, TILE)
        within = (nth % BLOCK_SIZE)[:, None] * cache_slot_stride + dim[None, :]

        if KEY_REST:
            rest = tl.arange(0, PADDED_REST)
            is_rest = rest < KEY_REST
            rests = query + token[:, None] * query_token_stride + head[:, None] * query_head_stride + HEAD_DIM
            rest_queries = tl.load(rests + rest[None, :], mask=is_row[:, None] & is_rest[None, :], other=0.0)
            # As they were above.
            if queries.dtype != rest_queries.dtype:
                rest_queries = tl.clamp(rest_queries.to(tl.float32), -65504.0, 65504.0).to(tl.float16)
            within_rest = (nth % BLOCK_SIZE)[:, None] * cache_slot_stride + HEAD_DIM + rest[None, :]
        else:
            # Not read.
            rest_queries, within_rest, is_rest = queries, within, is_dim

        highest = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        weighted = tl.zeros([ROWS, PADDED_DIM], tl.float32)
        if HAS_SINKS:
            # As if a key without a value had been seen. Of parts, the merge sees it: once a query, however it is cut.
            has_sink = is_row & (is_final == 1)
            highest = tl.load(sinks + head, mask=has_sink, other=float("-inf")) * LOG2_E
            total = tl.where(has_sink, 1.0, 0.0)
        even = tl.zeros([ROWS, PADDED_DIM // 2], tl.float32)
        odd = tl.zeros([ROWS, PADDED_DIM // 2], tl.float32)
        masked_begin = begin
        if HAS_WHOLE:
            masked_begin += tl.maximum(0, tl.minimum(kv_end, first_position + 1) - begin) // TILE * TILE
            for start in range(begin, masked_begin, TILE):
                highest, total, weighted, even, odd = _step(
                    highest, total, weighted, even, odd, queries, rest_queries, position, keys, values, table,
                    start, kv_begin, kv_end, scale, soft_cap, sliding_window, cache_block_stride,
                    cache_slot_stride, nth, within, is_dim, within_rest, is_rest, HEAD_DIM, PADDED_DIM, KEY_REST,
                    BLOCK_SIZE, IS_PAIRED, False, HAS_WINDOW, HAS_SOFT_CAP, PRECISION,
                )  # fmt: skip
        for start in range(masked_begin, kv_end, TILE):
            highest, total, weighted, even, odd = _step(
                highest, total, weighted, even, odd, queries, rest_queries, position, keys, values, table,
                start, kv_begin, kv_end, scale, soft_cap, sliding_window, cache_block_stride,
                cache_slot_stride, nth, within, is_dim, within_rest, is_rest, HEAD_DIM, PADDED_DIM, KEY_REST,
                BLOCK_SIZE, IS_PAIRED, True, HAS_WINDOW, HAS_SOFT_CAP, PRECISION,
            )  # fmt: skip
        if IS_PAIRED:
            weighted = tl.interleave(even, odd)

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
            rows = partial_output + part[:, None] * HEAD_DIM + dim[None, :]
            tl.store(rows, attended.to(partial_output.dtype.element_ty), mask=is_entry)
            tl.store(partial_lse + part, row_lse, mask=is_row)
    if FOLLOWS_WIDE:
        wait_at_end(IS_EARLY)


@triton.jit
def _step(
    highest,
    total,
    weighted,
    even,
    odd,
    queries,
    rest_queries,
    position,
    keys,
    values,
    table,
    start,
    kv_begin,
    kv_end,
    scale,
    soft_cap,
    sliding_window,
    cache_block_stride,
    cache_slot_stride,
    nth,
    within,
    is_dim,
    within_rest,
    is_rest,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    KEY_REST: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    IS_PAIRED: tl.constexpr,
    IS_MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The scores of a tile, and its values by them."""
    tile_keys = _tile(
        keys, table, start, kv_end, cache_block_stride, cache_slot_stride, nth, within, is_dim, BLOCK_SIZE, IS_MASKED
    ).to(queries.dtype)
    scores = tl.dot(queries, tl.trans(tile_keys), input_precision=PRECISION)
    if KEY_REST:
        tile_rest = _tile(
            keys, table, start, kv_end, cache_block_stride, cache_slot_stride, nth, within_rest, is_rest,
            BLOCK_SIZE, IS_MASKED,
        ).to(queries.dtype)  # fmt: skip
        scores = tl.dot(rest_queries, tl.trans(tile_rest), scores, input_precision=PRECISION)
    highest, total, decay, weights = _weigh(
        scores, highest, total, position, start + nth, kv_begin, kv_end, scale, soft_cap, sliding_window,
        IS_MASKED, HAS_WINDOW, HAS_SOFT_CAP,
    )  # fmt: skip
    if KEY_REST:
        weighted = _add(weighted * decay[:, None], weights, tile_keys, PRECISION)
    elif IS_PAIRED:
        even_values, odd_values = _tile_of_pairs(
            values, table, start, kv_end, cache_block_stride, cache_slot_stride, nth, BLOCK_SIZE, HEAD_DIM,
            PADDED_DIM, queries.dtype, IS_MASKED,
        )  # fmt: skip
        even = _add(even * decay[:, None], weights, even_values, PRECISION)
        odd = _add(odd * decay[:, None], weights, odd_values, PRECISION)
    else:
        tile_values = _tile(
            values, table, start, kv_end, cache_block_stride, cache_slot_stride, nth, within, is_dim,
            BLOCK_SIZE, IS_MASKED,
        ).to(queries.dtype)  # fmt: skip
        weighted = _add(weighted * decay[:, None], weights, tile_values, PRECISION)
    return highest, total, weighted, even, odd


@triton.jit
def _tile(
    cache,
    table,
    start,
    kv_end,
    cache_block_stride,
    cache_slot_stride,
    nth,
    within,
    is_dim,
    BLOCK_SIZE: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """Keys or values from `start` on. Beyond the end lies what nobody wrote: it is read as zero, since zero weight
    times NaN would be NaN."""
    at = table + start // BLOCK_SIZE + nth // BLOCK_SIZE
    block = tl.load(at, mask=start + nth < kv_end, other=0) if IS_MASKED else tl.load(at)
    # Unsigned, so that the product is one instruction.
    slot = block.to(tl.uint32).to(tl.uint64) * cache_block_stride.to(tl.uint32).to(tl.uint64)
    if nth.shape[0] < BLOCK_SIZE:
        slot += (start % BLOCK_SIZE * cache_slot_stride).to(tl.uint64)
    is_read = (start + nth < kv_end)[:, None] & is_dim[None, :] if IS_MASKED else is_dim[None, :]
    return tl.load(cache + slot[:, None] + within, mask=is_read, other=0.0)


@triton.jit
def _tile_of_pairs(
    cache,
    table,
    start,
    kv_end,
    cache_block_stride,
    cache_slot_stride,
    nth,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    dtype: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """As `_tile`, of numbers of 8 bits: those of even dimensions, and those of odd ones.

    They are read in pairs: shared memory turns numbers of 16 bits around by itself, and gives smaller ones one by one.
    """
    pair = tl.arange(0, PADDED_DIM // 2)
    within = (nth % BLOCK_SIZE)[:, None] * (cache_slot_stride // 2) + pair[None, :]
    pairs = _tile(
        cache.to(tl.pointer_type(tl.uint16)), table, start, kv_end, cache_block_stride // 2, cache_slot_stride // 2,
        nth, within, pair < HEAD_DIM // 2, BLOCK_SIZE, IS_MASKED,
    )  # fmt: skip
    even = (pairs & 0xFF).to(tl.uint8).to(cache.dtype.element_ty, bitcast=True)
    odd = (pairs >> 8).to(tl.uint8).to(cache.dtype.element_ty, bitcast=True)
    return even.to(dtype), odd.to(dtype)


@triton.jit
def _add(weighted, weights, tile_values, PRECISION: tl.constexpr):
    return tl.dot(weights.to(tile_values.dtype), tile_values, weighted, input_precision=PRECISION)


@triton.jit
def _weigh(
    scores,
    highest,
    total,
    position,
    key,
    kv_begin,
    kv_end,
    scale,
    soft_cap,
    sliding_window,
    IS_MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
):
    """The running softmax (in powers of two) after more keys: its highest score and total, what to multiply by what
    was summed up so far, and the keys' weights."""
    if HAS_SOFT_CAP:
        scores = _tanh(scores * (scale / soft_cap))
        factor = soft_cap * LOG2_E
    else:
        factor = scale * LOG2_E
    if IS_MASKED:
        is_seen = (key < kv_end)[None, :] & (key[None, :] <= position[:, None])
        if HAS_WINDOW:
            is_seen = is_seen & (key >= kv_begin)[None, :] & (key[None, :] > position[:, None] - sliding_window)
        scores = tl.where(is_seen, scores, float("-inf"))
    new_highest = tl.maximum(highest, tl.max(scores, 1) * factor)
    # While a row has seen nothing its highest is -inf, and -inf less -inf would be NaN.
    base = tl.where(new_highest == float("-inf"), 0.0, new_highest) if IS_MASKED else new_highest
    weights = tl.exp2(scores * factor - base[:, None])
    decay = tl.exp2(highest - base)
    return new_highest, total * decay + tl.sum(weights, 1), decay, weights


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
    sinks,
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
    HAS_SINKS: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """One unit is a token and `HEADS` of its heads: their parts' outputs, weighted by e to their log-sum-exps."""
    wait_for_inputs(IS_EARLY)
    dim = tl.arange(0, PADDED_DIM)
    chunks = tl.cdiv(num_heads, HEADS)
    for unit in range(tl.program_id(0), tl.load(num_merges) * chunks, tl.num_programs(0)):
        merge = unit // chunks
        head = unit % chunks * HEADS + tl.arange(0, HEADS)
        is_head = head < num_heads
        is_entry = is_head[:, None] & (dim < HEAD_DIM)[None, :]
        token = tl.load(merge_tokens + merge).to(tl.int64)
        end = tl.load(merge_starts + merge + 1)
        outputs = partial_output + head[:, None] * HEAD_DIM + dim[None, :]
        lses = partial_lse + head
        highest = tl.full([HEADS], float("-inf"), tl.float32)
        total = tl.zeros([HEADS], tl.float32)
        if HAS_SINKS:
            # A part without values.
            highest = tl.load(sinks + head, mask=is_head, other=0.0)
            total = tl.full([HEADS], 1.0, tl.float32)
        weighted = tl.zeros([HEADS, PADDED_DIM], tl.float32)
        for start in range(tl.load(merge_starts + merge), end, 4):
            # All loads come first, so that a token with so many parts waits for memory once.
            lse_0, part_0 = _part(outputs, lses, merge_rows, start, end, num_heads, is_entry, is_head, HEAD_DIM)
            lse_1, part_1 = _part(outputs, lses, merge_rows, start + 1, end, num_heads, is_entry, is_head, HEAD_DIM)
            lse_2, part_2 = _part(outputs, lses, merge_rows, start + 2, end, num_heads, is_entry, is_head, HEAD_DIM)
            lse_3, part_3 = _part(outputs, lses, merge_rows, start + 3, end, num_heads, is_entry, is_head, HEAD_DIM)
            new_highest = tl.maximum(tl.maximum(tl.maximum(lse_0, lse_1), tl.maximum(lse_2, lse_3)), highest)
            base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
            decay = tl.exp(highest - base)
            weight_0, weight_1 = tl.exp(lse_0 - base), tl.exp(lse_1 - base)
            weight_2, weight_3 = tl.exp(lse_2 - base), tl.exp(lse_3 - base)
            total = total * decay + weight_0 + weight_1 + weight_2 + weight_3
            weighted = weighted * decay[:, None] + part_0 * weight_0[:, None] + part_1 * weight_1[:, None]
            weighted += part_2 * weight_2[:, None] + part_3 * weight_3[:, None]
            highest = new_highest
        at = output + token * output_token_stride + head[:, None] * output_head_stride + dim[None, :]
        divisor = tl.where(total > 0, total, 1.0)
        tl.store(at, (weighted / divisor[:, None]).to(output.dtype.element_ty), mask=is_entry)
        if HAS_LSE:
            tl.store(lse + token * num_heads + head, highest + tl.log(divisor), mask=is_head)


@triton.jit
def _part(outputs, lses, merge_rows, index, end, num_heads, is_entry, is_head, HEAD_DIM: tl.constexpr):
    """The log-sum-exps and outputs of a part; without weight from `end` on."""
    first = tl.load(merge_rows + index, mask=index < end, other=0).to(tl.int64) * num_heads
    part_lse = tl.load(lses + first, mask=is_head & (index < end), other=float("-inf"))
    return part_lse, tl.load(outputs + first * HEAD_DIM, mask=is_entry & (index < end), other=0.0).to(tl.float32)
