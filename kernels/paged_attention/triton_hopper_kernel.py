"""The GPU's attention for many queries on Hopper, in Gluon: as `attend_kernel`, by warps with tasks of their own.

Some warps bring keys and values into shared memory, and two groups of four warps multiply. Neither group waits for the
other, so that one multiplies while the other has its softmax, and each has the products of a tile's values computed
while it weighs the tile after it (FlashAttention-3, arXiv 2407.08608).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .kernel_shapes import WIDE_ROWS

# Rows of a group.
HALF = gl.constexpr(WIDE_ROWS // 2)
LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
ITEM_SIZE = gl.constexpr(8)
# Of a tile, what is brought at a time, and how many numbers by a thread: 16 bytes.
PART = gl.constexpr(32)
VECTOR, FP8_VECTOR = gl.constexpr(8), gl.constexpr(16)
# Warps that bring tiles, and registers of their threads and of those that multiply: together all that there are.
COPYING, COPYING_REGISTERS, MULTIPLYING_REGISTERS = gl.constexpr(4), gl.constexpr(56), gl.constexpr(224)
WIDENING, WIDENING_REGISTERS, BESIDE_WIDENING_REGISTERS = gl.constexpr(8), gl.constexpr(48), gl.constexpr(208)


@gluon.jit
def attend_hopper_kernel(
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
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    PADDED_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    HAS_WINDOW: gl.constexpr,
    HAS_SOFT_CAP: gl.constexpr,
    HAS_LSE: gl.constexpr,
    HAS_SINKS: gl.constexpr,
    IS_EARLY: gl.constexpr,
):
    """As `attend_kernel`, for units of `WIDE_ROWS` rows at most; to be launched with four warps, the first group.

    `STAGES`: how many tiles of `TILE` keys there is room for, and of values. A cache in FP8 is widened to float16 by
    those who bring it.
    """
    if IS_EARLY:
        # As `wait_for_inputs`: the other warps begin after these.
        gdc_wait()
        gdc_launch_dependents()
    is_fp8: gl.constexpr = key_cache.dtype.element_ty.is_fp8()
    dtype: gl.constexpr = _multiplied_type(query, is_fp8)
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    first_rows = gl.allocate_shared_memory(dtype, [HALF, PADDED_DIM], layout)
    other_rows = gl.allocate_shared_memory(dtype, [HALF, PADDED_DIM], layout)
    # Each thread says for itself that what it copied is there; of those that widen, one says it for all.
    arrivals: gl.constexpr = 1 if is_fp8 else 32 * COPYING
    keys = _ring(dtype, TILE, PADDED_DIM, STAGES, arrivals, layout)
    values = _ring(dtype, TILE, PADDED_DIM, STAGES, arrivals, layout)
    work = items, num_items, num_kv_heads
    cache = blocks, key_cache, value_cache, cache_block_stride, cache_slot_stride, cache_head_stride
    results = output, lse, partial_output, partial_lse, output_token_stride, output_head_stride
    queries = query, query_tokens, query_token_stride, query_head_stride
    numbers = scale, value_scale, soft_cap, sliding_window, sinks
    sizes: gl.constexpr = (GROUP, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, STAGES, TILE)
    kinds: gl.constexpr = (HAS_WINDOW, HAS_SOFT_CAP, HAS_LSE, HAS_SINKS)
    first = work, results, queries, numbers, first_rows, keys, values, 0, sizes, kinds
    other = work, results, queries, numbers, other_rows, keys, values, HALF, sizes, kinds
    if is_fp8:
        narrow_layout: gl.constexpr = gl.SwizzledSharedLayout(FP8_VECTOR, 1, PADDED_DIM // FP8_VECTOR, [1, 0])
        narrow_keys = gl.allocate_shared_memory(key_cache.dtype.element_ty, [TILE, PADDED_DIM], narrow_layout)
        narrow_values = gl.allocate_shared_memory(key_cache.dtype.element_ty, [TILE, PADDED_DIM], narrow_layout)
        gl.warp_specialize(
            [
                (_multiply, first),
                (_multiply, other),
                (_widen, (work, cache, keys, values, narrow_keys, narrow_values, sizes)),
            ],
            [4, WIDENING],
            [BESIDE_WIDENING_REGISTERS, WIDENING_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [(_multiply, first), (_multiply, other), (_copy, (work, cache, keys, values, sizes))],
            [4, COPYING],
            [MULTIPLYING_REGISTERS, COPYING_REGISTERS],
        )


@gluon.constexpr_function
def _multiplied_type(query, is_fp8):
    """In which products are computed: float16 has all numbers of FP8."""
    dtype = query.dtype.element_ty
    return gl.float16 if is_fp8 and dtype == gl.bfloat16 else dtype


@gluon.constexpr_function
def _rows_layout(padded_dim, vector, num_warps):
    """Rows of so many numbers, a vector of them a thread."""
    lanes = padded_dim // vector
    return gl.BlockedLayout([1, vector], [32 // lanes, lanes], [num_warps, 1], [1, 0])


@gluon.jit
def _ring(
    dtype: gl.constexpr,
    TILE: gl.constexpr,
    PADDED_DIM: gl.constexpr,
    STAGES: gl.constexpr,
    ARRIVALS: gl.constexpr,
    layout: gl.constexpr,
):
    """Tiles, and for each the barriers that say that it is there and that both groups are done with it."""
    tiles = gl.allocate_shared_memory(dtype, [STAGES, TILE, PADDED_DIM], layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=ARRIVALS)
        mbarrier.init(free.index(stage), count=2)
    return tiles, ready, free


@gluon.jit
def _stage(count, STAGES: gl.constexpr):
    """Of the tile after so many: where it is, and the phase that its barriers have then."""
    return count % STAGES, count // STAGES & 1


@gluon.jit
def _num_units(work):
    _, num_items, num_kv_heads = work
    return gl.load(num_items) * num_kv_heads


@gluon.jit
def _item_of(work, nth_unit, num_units):
    """Where a program's unit's item is, and which KV head it is for. See `attend_kernel` for their order."""
    items, _, num_kv_heads = work
    program, num_programs = gl.program_id(0), gl.num_programs(0)
    round_begin = nth_unit - program
    mirrored = gl.minimum(round_begin + num_programs, num_units) - 1 - program
    unit = gl.where(round_begin // num_programs % 2 == 0, nth_unit, mirrored)
    return items + unit // num_kv_heads * ITEM_SIZE, unit % num_kv_heads


@gluon.jit
def _keys_of(item, sizes: gl.constexpr):
    """Where an item's tiles begin, its first key, where its keys end, and its tiles: there is one at least."""
    kv_begin, kv_end = gl.load(item + 3), gl.load(item + 4)
    block_size: gl.constexpr = sizes[3]
    tile: gl.constexpr = sizes[5]
    least: gl.constexpr = block_size if block_size < tile else tile
    begin = kv_begin // least * least
    return begin, kv_begin, kv_end, gl.maximum(kv_end, begin + 1)


@gluon.jit
def _copy(work, cache, keys, values, sizes: gl.constexpr):
    """Bring the tiles of a program's units, as soon as there is room for them."""
    tile: gl.constexpr = sizes[5]
    num_units = _num_units(work)
    count = 0
    for nth_unit in range(gl.program_id(0), num_units, gl.num_programs(0)):
        item, kv_head = _item_of(work, nth_unit, num_units)
        begin, _, kv_end, end = _keys_of(item, sizes)
        table, of_keys, of_values = _of_head(cache, item, kv_head)
        whole_end = begin + (kv_end - begin) // tile * tile
        for start in range(begin, whole_end, tile):
            _copy_tile(keys, count, of_keys, table, start, kv_end, sizes, False)
            _copy_tile(values, count, of_values, table, start, kv_end, sizes, False)
            count += 1
        for start in range(whole_end, end, tile):
            _copy_tile(keys, count, of_keys, table, start, kv_end, sizes, True)
            _copy_tile(values, count, of_values, table, start, kv_end, sizes, True)
            count += 1
    # What is under way is written before this memory is another program's.
    async_copy.commit_group()
    async_copy.wait_group(0)


@gluon.jit
def _of_head(cache, item, kv_head):
    """An item's block table, and where a head's keys and values are, with the strides of blocks and slots."""
    blocks, key_cache, value_cache, block_stride, slot_stride, head_stride = cache
    of_keys = key_cache + kv_head * head_stride, block_stride, slot_stride
    of_values = value_cache + kv_head * head_stride, block_stride, slot_stride
    return blocks + gl.load(item + 2), of_keys, of_values


@gluon.jit
def _copy_tile(ring, count, cache, table, start, kv_end, sizes: gl.constexpr, IS_MASKED: gl.constexpr):
    stages: gl.constexpr = sizes[4]
    tiles, ready, free = ring
    stage, phase = _stage(count, stages)
    mbarrier.wait(free.index(stage), phase ^ 1)
    _begin_copy(tiles.index(stage), cache, table, start, kv_end, sizes, VECTOR, COPYING, PART, IS_MASKED)
    async_copy.mbarrier_arrive(ready.index(stage), increment_count=False)


@gluon.jit
def _begin_copy(
    tile,
    cache,
    table,
    start,
    kv_end,
    sizes: gl.constexpr,
    VECTOR: gl.constexpr,
    WARPS: gl.constexpr,
    PART: gl.constexpr,
    IS_MASKED: gl.constexpr,
):
    """In parts of so many keys, so that few addresses are in registers. What is beyond the keys' end becomes zero."""
    head_dim: gl.constexpr = sizes[1]
    padded_dim: gl.constexpr = sizes[2]
    block_size: gl.constexpr = sizes[3]
    keys: gl.constexpr = sizes[5]
    layout: gl.constexpr = _rows_layout(padded_dim, VECTOR, WARPS)
    dim = gl.arange(0, padded_dim, layout=gl.SliceLayout(0, layout))
    for part in gl.static_range(0, keys, PART):
        nth = gl.arange(0, PART, layout=gl.SliceLayout(1, layout))
        slot, is_key = _slots(cache, table, start, part, nth, kv_end, block_size, IS_MASKED)
        is_read = is_key[:, None] & (dim < head_dim)[None, :] if IS_MASKED or head_dim < padded_dim else None
        at = cache[0] + slot[:, None] + dim[None, :]
        async_copy.async_copy_global_to_shared(tile.slice(part, PART), at, mask=is_read)


@gluon.jit
def _slots(cache, table, start, part, nth, kv_end, BLOCK_SIZE: gl.constexpr, IS_MASKED: gl.constexpr):
    """Where the keys of a part of a tile are in the cache, and which of them there are."""
    _, block_stride, slot_stride = cache
    # Tiles begin where a block does, or are parts of one.
    if nth.shape[0] % BLOCK_SIZE == 0:
        at, within = table + (start + part) // BLOCK_SIZE + nth // BLOCK_SIZE, nth % BLOCK_SIZE
    else:
        at, within = table + (start + part + nth) // BLOCK_SIZE, (start + part + nth) % BLOCK_SIZE
    is_key = start + part + nth < kv_end
    block = gl.load(at, mask=is_key, other=0) if IS_MASKED else gl.load(at)
    # Unsigned, so that the product is one instruction.
    slot = block.to(gl.uint32).to(gl.uint64) * block_stride.to(gl.uint32).to(gl.uint64)
    return slot + (within * slot_stride).to(gl.uint64), is_key


@gluon.jit
def _widen(work, cache, keys, values, narrow_keys, narrow_values, sizes: gl.constexpr):
    """As `_copy`, of numbers of 8 bits, whose tiles lie in shared memory as they are before they are widened."""
    tile: gl.constexpr = sizes[5]
    num_units = _num_units(work)
    count = 0
    for nth_unit in range(gl.program_id(0), num_units, gl.num_programs(0)):
        item, kv_head = _item_of(work, nth_unit, num_units)
        begin, _, kv_end, end = _keys_of(item, sizes)
        table, of_keys, of_values = _of_head(cache, item, kv_head)
        _begin_narrow_copy(narrow_keys, of_keys, table, begin, kv_end, sizes)
        _begin_narrow_copy(narrow_values, of_values, table, begin, kv_end, sizes)
        for start in range(begin, end, tile):
            _widen_tile(keys, count, narrow_keys, sizes)
            _begin_narrow_copy(narrow_keys, of_keys, table, start + tile, kv_end, sizes)
            _widen_tile(values, count, narrow_values, sizes)
            _begin_narrow_copy(narrow_values, of_values, table, start + tile, kv_end, sizes)
            count += 1
        async_copy.wait_group(0)


@gluon.jit
def _begin_narrow_copy(tile, cache, table, start, kv_end, sizes: gl.constexpr):
    _begin_copy(tile, cache, table, start, kv_end, sizes, FP8_VECTOR, WIDENING, sizes[5], True)
    async_copy.commit_group()


@gluon.jit
def _widen_tile(ring, count, narrow, sizes: gl.constexpr):
    """The older of the two copies that are under way."""
    padded_dim: gl.constexpr = sizes[2]
    stages: gl.constexpr = sizes[4]
    tiles, ready, free = ring
    layout: gl.constexpr = _rows_layout(padded_dim, FP8_VECTOR, WIDENING)
    async_copy.wait_group(1)
    wide = narrow.load(layout).to(tiles.dtype)
    stage, phase = _stage(count, stages)
    mbarrier.wait(free.index(stage), phase ^ 1)
    tiles.index(stage).store(wide)
    hopper.fence_async_shared()
    mbarrier.arrive(ready.index(stage))


@gluon.jit
def _multiply(
    work,
    results,
    queries,
    numbers,
    query_tile,
    keys,
    values,
    FIRST_ROW: gl.constexpr,
    sizes: gl.constexpr,
    kinds: gl.constexpr,
):
    """A group's rows of each of a program's units."""
    group: gl.constexpr = sizes[0]
    head_dim: gl.constexpr = sizes[1]
    padded_dim: gl.constexpr = sizes[2]
    stages: gl.constexpr = sizes[4]
    tile: gl.constexpr = sizes[5]
    has_window: gl.constexpr = kinds[0]
    has_soft_cap: gl.constexpr = kinds[1]
    has_lse: gl.constexpr = kinds[2]
    has_sinks: gl.constexpr = kinds[3]
    output, lse, partial_output, partial_lse, output_token_stride, output_head_stride = results
    query, query_tokens, query_token_stride, query_head_stride = queries
    scale, value_scale, soft_cap, sliding_window, sinks = numbers
    dtype: gl.constexpr = query_tile.dtype
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, tile, 16])
    sums_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, padded_dim, 16])
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, sums_layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, scores_layout)
    entry_layout: gl.constexpr = _rows_layout(padded_dim, VECTOR, 4)
    row = FIRST_ROW + gl.arange(0, HALF, layout=row_layout)
    # An entry is one of a row's numbers, as they lie in memory.
    entry_row = FIRST_ROW + gl.arange(0, HALF, layout=gl.SliceLayout(1, entry_layout))
    dim = gl.arange(0, padded_dim, layout=gl.SliceLayout(0, entry_layout))
    nth = gl.arange(0, tile, layout=gl.SliceLayout(0, scores_layout))
    factor = (soft_cap if has_soft_cap else scale) * LOG2_E
    num_units, num_kv_heads = _num_units(work), work[2]
    num_heads = num_kv_heads * group
    count = 0
    for nth_unit in range(gl.program_id(0), num_units, gl.num_programs(0)):
        item, kv_head = _item_of(work, nth_unit, num_units)
        first_query, num_queries = gl.load(item), gl.load(item + 1)
        begin, kv_begin, kv_end, end = _keys_of(item, sizes)
        first_position, is_final, first_partial = gl.load(item + 5), gl.load(item + 6), gl.load(item + 7)

        entry_query, entry_head = entry_row // group, kv_head * group + entry_row % group
        is_query = entry_query < num_queries
        token = gl.load(query_tokens + first_query + entry_query, mask=is_query, other=0).to(gl.int64)
        is_entry = is_query[:, None] & (dim < head_dim)[None, :]
        at = query + token[:, None] * query_token_stride + entry_head[:, None] * query_head_stride + dim[None, :]
        rows = gl.load(at, mask=is_entry, other=0.0)
        if dtype != rows.dtype:
            # No query is too large for float16.
            rows = gl.minimum(gl.maximum(rows.to(gl.float32), -65504.0), 65504.0)
        query_tile.store(rows.to(dtype))
        hopper.fence_async_shared()

        is_row, head = row // group < num_queries, kv_head * group + row % group
        position = first_position + row // group
        last = gl.minimum(position, kv_end - 1)
        first = gl.maximum(kv_begin, position - sliding_window + 1) if has_window else last
        highest = gl.full([HALF], float("-inf"), gl.float32, row_layout)
        total = gl.zeros([HALF], gl.float32, row_layout)
        if has_sinks:
            # As if a key without a value had been seen. Of parts, the merge sees it: once a query, however it is cut.
            has_sink = is_row & (is_final == 1)
            highest = gl.load(sinks + head, mask=has_sink, other=float("-inf")) * LOG2_E
            total = gl.where(has_sink, 1.0, 0.0)
        weighted = gl.zeros([HALF, padded_dim], gl.float32, sums_layout)
        none = gl.zeros([HALF, tile], gl.float32, scores_layout)
        seen = first, last, factor, scale, soft_cap
        # Tiles that begin before it every row sees whole.
        masked_begin = begin if has_window else gl.minimum(kv_end, first_position + 1) - tile + 1
        scores = hopper.warpgroup_mma_wait(0, deps=[_begin_scores(query_tile, keys, count, none, stages)])
        _done_with(keys, count, stages)
        highest, total, _, weights = _weigh(
            scores, highest, total, begin + nth, seen, begin >= masked_begin, has_window, has_soft_cap
        )
        weights = gl.convert_layout(weights.to(dtype), weights_layout)
        for start in range(begin + tile, end, tile):
            # The scores of a tile, and in the meantime the values of the one before it.
            scores = _begin_scores(query_tile, keys, count + 1, none, stages)
            weighted = _begin_sums(weights, values, count, weighted, stages)
            scores = hopper.warpgroup_mma_wait(1, deps=[scores])
            _done_with(keys, count + 1, stages)
            highest, total, decay, next_weights = _weigh(
                scores, highest, total, start + nth, seen, start >= masked_begin, has_window, has_soft_cap
            )
            weighted, weights = hopper.warpgroup_mma_wait(0, deps=[weighted, weights])
            _done_with(values, count, stages)
            weighted = weighted * gl.convert_layout(decay, gl.SliceLayout(1, sums_layout))[:, None]
            weights = gl.convert_layout(next_weights.to(dtype), weights_layout)
            count += 1
        weighted = _begin_sums(weights, values, count, weighted, stages)
        weighted, weights = hopper.warpgroup_mma_wait(0, deps=[weighted, weights])
        _done_with(values, count, stages)
        count += 1

        # A row that saw no key has an output of zero and a log-sum-exp of -inf, and so no weight in a merge.
        divisor = gl.where(total > 0, total, 1.0)
        share = gl.convert_layout(value_scale / divisor, gl.SliceLayout(1, sums_layout))
        attended = gl.convert_layout((weighted * share[:, None]).to(output.dtype.element_ty), entry_layout)
        row_lse = highest * LN_2 + gl.log(divisor)
        if is_final:
            at = output + token[:, None] * output_token_stride + entry_head[:, None] * output_head_stride + dim[None, :]
            gl.store(at, attended, mask=is_entry)
            if has_lse:
                row_token = gl.load(query_tokens + first_query + row // group, mask=is_row, other=0).to(gl.int64)
                gl.store(lse + row_token * num_heads + head, row_lse, mask=is_row)
        else:
            entry_part = (first_partial + entry_query).to(gl.int64) * num_heads + entry_head
            gl.store(partial_output + entry_part[:, None] * head_dim + dim[None, :], attended, mask=is_entry)
            part = (first_partial + row // group).to(gl.int64) * num_heads + head
            gl.store(partial_lse + part, row_lse, mask=is_row)


@gluon.jit
def _begin_scores(query_tile, keys, count, none, STAGES: gl.constexpr):
    tiles, ready, _ = keys
    stage, phase = _stage(count, STAGES)
    mbarrier.wait(ready.index(stage), phase)
    return hopper.warpgroup_mma(query_tile, tiles.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)


@gluon.jit
def _begin_sums(weights, values, count, weighted, STAGES: gl.constexpr):
    tiles, ready, _ = values
    stage, phase = _stage(count, STAGES)
    mbarrier.wait(ready.index(stage), phase)
    return hopper.warpgroup_mma(weights, tiles.index(stage), weighted, is_async=True)


@gluon.jit
def _done_with(ring, count, STAGES: gl.constexpr):
    _, _, free = ring
    stage, _ = _stage(count, STAGES)
    mbarrier.arrive(free.index(stage))


@gluon.jit
def _weigh(scores, highest, total, key, seen, is_masked, HAS_WINDOW: gl.constexpr, HAS_SOFT_CAP: gl.constexpr):
    """As `triton_kernels._weigh`; `seen`: each row's first and last key, and the numbers of the softmax.

    Masks are behind a branch: a loop without them beside one with them was as fast, and its code so long that the
    kernels after it were slower.
    """
    first, last, factor, scale, soft_cap = seen
    if HAS_SOFT_CAP:
        scores = _tanh(scores * (scale / soft_cap))
    if is_masked:
        is_seen = key[None, :] <= last[:, None]
        if HAS_WINDOW:
            is_seen = is_seen & (key[None, :] >= first[:, None])
        scores = gl.where(is_seen, scores, float("-inf"))
    new_highest = gl.maximum(highest, gl.max(scores, 1) * factor)
    # While a row has seen nothing its highest is -inf, and -inf less -inf would be NaN.
    base = gl.where(new_highest == float("-inf"), 0.0, new_highest)
    weights = gl.exp2(scores * factor - base[:, None])
    decay = gl.exp2(highest - base)
    return new_highest, total * decay + gl.sum(weights, 1), decay, weights


@gluon.jit
def _tanh(x):
    decay = gl.exp(-2.0 * gl.abs(x))
    return gl.where(x < 0, -1.0, 1.0) * (1.0 - decay) / (1.0 + decay)
