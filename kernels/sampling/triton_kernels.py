"""From logits to tokens on the GPU, without sorting the vocabulary.

What top-k and top-p keep is all from some logit on. That logit is found by bisection over the floats' bit patterns,
which as integers have the floats' order; each pass also jumps to the nearest logits that there are, so that a search
ends after about as many passes as the number of logits in question has bits.
"""

import triton
import triton.language as tl

# Below every key but a NaN's.
BELOW_ALL = tl.constexpr(-(2**31))
ABOVE_ALL = tl.constexpr(2**31 - 1)
LARGEST_FLOAT = tl.constexpr(3.0e38)
# Pieces of a row that are under way at a time: what a pass takes is otherwise the waiting for one after the other.
STAGES = tl.constexpr(4)
# Neighbours that one thread loads at a time: 16 bytes of them.
TOGETHER = tl.constexpr(8)
HALF_WORD = tl.constexpr(2.0**-32)


@triton.jit
def sample_kernel(
    tokens, logits, temperature, top_k, top_p, min_p, uniforms, vocab_size, stride, COLUMNS: tl.constexpr
):
    """One program a row."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    column = tl.arange(0, COLUMNS)
    highest = tl.full([COLUMNS], float("-inf"), tl.float32)
    for start in tl.range(0, vocab_size, COLUMNS, num_stages=STAGES):
        highest = tl.maximum(highest, _load(logits, start + column, vocab_size))
    peak = tl.max(highest, 0)
    # A difference of zero must stay zero, however small the temperature: no infinite factor.
    factor = tl.minimum(1.0 / tl.load(temperature + row), LARGEST_FLOAT).to(tl.float32)

    least = _key(peak).to(tl.int64) * 0 + BELOW_ALL + 1
    k = tl.load(top_k + row)
    p = tl.load(top_p + row)
    if (k > 0) & (k < vocab_size):
        least = _least_kept(logits, vocab_size, peak, factor, k.to(tl.float64), least, True, COLUMNS)
    if p < 1.0:
        count, mass = _above(logits, vocab_size, peak, factor, least, COLUMNS)
        if (k > 0) & (k < vocab_size):
            # Of the tokens equal to the k-th, the first k have their share of the mass, and no more.
            mass += (k - count) * tl.exp((_logit(least) - peak) * factor).to(tl.float64)
        else:
            _, mass = _above(logits, vocab_size, peak, factor, least - 1, COLUMNS)
        least = _least_kept(logits, vocab_size, peak, factor, p * mass, least, False, COLUMNS)

    smallest_weight = tl.load(min_p + row).to(tl.float32)
    total = tl.zeros([COLUMNS], tl.float32)
    for start in tl.range(0, vocab_size, COLUMNS, num_stages=STAGES):
        total += _kept_weights(logits, start + column, vocab_size, peak, factor, least, smallest_weight)
    target = tl.load(uniforms + row) * tl.sum(total.to(tl.float64), 0)

    # The last kept token stands in where rounding leaves the cumulative sum below the target.
    picked = row * 0 - 1
    is_found = picked >= 0
    mass_before = target * 0.0
    for start in tl.range(0, vocab_size, COLUMNS, num_stages=STAGES):
        if not is_found:
            weights = _kept_weights(logits, start + column, vocab_size, peak, factor, least, smallest_weight)
            cumulative = mass_before + tl.cumsum(weights.to(tl.float64), 0)
            crossing = tl.min(tl.where((weights > 0) & (cumulative >= target), column, COLUMNS), 0)
            is_found = crossing < COLUMNS
            last = tl.max(tl.where(weights > 0, column, -1), 0)
            chosen = tl.where(is_found, crossing, last)
            picked = tl.where(chosen >= 0, start + chosen, picked)
            mass_before += tl.sum(weights.to(tl.float64), 0)
    tl.store(tokens + row, picked)


@triton.jit
def _least_kept(logits, vocab_size, peak, factor, limit, floor, BY_COUNT: tl.constexpr, COLUMNS: tl.constexpr):
    """The least key at or above `floor` over which there is less than `limit`, in number or in weight."""
    column = tl.arange(0, COLUMNS)
    failing = floor - 1
    passing = _key(peak).to(tl.int64)
    while passing - failing > 1:
        middle = (failing + passing) >> 1
        amount = tl.zeros([COLUMNS], tl.float32)
        below = tl.full([COLUMNS], BELOW_ALL, tl.int32)
        above = tl.full([COLUMNS], ABOVE_ALL, tl.int32)
        for start in tl.range(0, vocab_size, COLUMNS, num_stages=STAGES):
            logit = _load(logits, start + column, vocab_size)
            key = tl.where(start + column < vocab_size, _key(logit), BELOW_ALL)
            is_above = key > middle.to(tl.int32)
            amount += tl.where(is_above, 1.0 if BY_COUNT else tl.exp((logit - peak) * factor), 0.0)
            below = tl.maximum(below, tl.where(is_above, BELOW_ALL, key))
            above = tl.minimum(above, tl.where(is_above, key, ABOVE_ALL))
        is_passing = tl.sum(amount.to(tl.float64), 0) < limit
        # On to the next key that some token has, which changes nothing about what is above.
        passing = tl.where(is_passing, tl.maximum(tl.max(below, 0).to(tl.int64), failing + 1), passing)
        failing = tl.where(is_passing, failing, tl.min(above, 0).to(tl.int64) - 1)
    return passing


@triton.jit
def _above(logits, vocab_size, peak, factor, key, COLUMNS: tl.constexpr):
    """The number and the weight of the tokens above a key."""
    column = tl.arange(0, COLUMNS)
    counts = tl.zeros([COLUMNS], tl.int32)
    weights = tl.zeros([COLUMNS], tl.float32)
    for start in tl.range(0, vocab_size, COLUMNS, num_stages=STAGES):
        logit = _load(logits, start + column, vocab_size)
        is_above = (start + column < vocab_size) & (_key(logit) > key.to(tl.int32))
        counts += is_above.to(tl.int32)
        weights += tl.where(is_above, tl.exp((logit - peak) * factor), 0.0)
    return tl.sum(counts, 0), tl.sum(weights.to(tl.float64), 0)


@triton.jit
def _kept_weights(logits, column, vocab_size, peak, factor, least, smallest_weight):
    """Each token's probability over that of the likeliest; zero for those that are not kept."""
    logit = _load(logits, column, vocab_size)
    weight = tl.exp((logit - peak) * factor)
    is_kept = (column < vocab_size) & (_key(logit) >= least.to(tl.int32)) & (weight >= smallest_weight)
    return tl.where(is_kept, weight, 0.0)


@triton.jit
def _load(logits, column, vocab_size):
    return tl.load(logits + column, mask=column < vocab_size, other=float("-inf")).to(tl.float32)


@triton.jit
def _key(logit):
    """int32 in the order of the floats. Both zeros have one key, as they are one number."""
    bits = tl.where(logit == 0.0, 0.0, logit).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _logit(key):
    """The float that has the key."""
    word = key.to(tl.int32)
    return (word ^ ((word >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["size"])
def uniform_kernel(uniforms, seeds, counters, size, NUMBERS: tl.constexpr):
    """As `philox_uniform`, by Triton's own Philox."""
    index = tl.program_id(0) * NUMBERS + tl.arange(0, NUMBERS)
    is_number = index < size
    counter = tl.load(counters + index, mask=is_number, other=0)
    low = (counter & 0xFFFFFFFF).to(tl.uint32)
    high = (counter >> 32).to(tl.uint32)
    word, _, _, _ = tl.philox(tl.load(seeds + index, mask=is_number, other=0), low, high, low * 0, low * 0)
    tl.store(uniforms + index, (word.to(tl.float64) + 0.5) * HALF_WORD, mask=is_number)


@triton.jit
def likeliest_kernel(
    tokens, highest_logits, log_sum_exps, logits, vocab_size, stride, HAS_LSE: tl.constexpr, COLUMNS: tl.constexpr
):
    """One program a row: its first largest logit, and the log of the sum of the exponentials."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    column = tl.arange(0, COLUMNS)
    # Of each piece a thread has neighbours: it finds their largest and their sum by itself, and keeps one of each.
    highest = tl.full([COLUMNS // TOGETHER], float("-inf"), tl.float32)
    where = tl.zeros([COLUMNS // TOGETHER], tl.int32)
    total = tl.zeros([COLUMNS // TOGETHER], tl.float32)
    for start in tl.range(0, vocab_size, COLUMNS, num_stages=STAGES):
        logit = tl.reshape(_load(logits, start + column, vocab_size), [COLUMNS // TOGETHER, TOGETHER])
        top = tl.reduce(logit, 1, _largest)
        if HAS_LSE:
            base = _base(_largest(highest, top))
            total = total * tl.exp(highest - base) + tl.sum(tl.exp(logit - base[:, None]), 1)
        where = tl.where(top > highest, start, where)
        highest = _largest(highest, top)
    peak = tl.reduce(highest, 0, _largest)
    # Of equal logits the first: that of the first piece, of the first neighbours, of the first of those.
    lane = tl.arange(0, COLUMNS // TOGETHER) * TOGETHER
    first = tl.min(tl.where(highest == peak, where + lane, vocab_size), 0)
    neighbour = tl.minimum(first, vocab_size - 1) + tl.arange(0, TOGETHER)
    is_peak = (_load(logits, neighbour, vocab_size) == peak) & (neighbour < vocab_size)
    token = tl.min(tl.where(is_peak, neighbour, vocab_size), 0)
    tl.store(tokens + row, tl.where(token < vocab_size, token, 0).to(tl.int64))
    tl.store(highest_logits + row, peak)
    if HAS_LSE:
        base = _base(peak)
        lse = tl.log(tl.sum(total * tl.exp(highest - base), 0)) + base
        tl.store(log_sum_exps + row, lse)


@triton.jit
def _largest(one, other):
    """A NaN stays: it is how a row that went wrong is found."""
    return tl.maximum(one, other, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _base(highest):
    """What to take off before an exponential: -inf less -inf would be NaN."""
    return tl.where(highest == float("-inf"), 0.0, highest)


@triton.jit(do_not_specialize=["size"])
def penalize_kernel(logits, rows, tokens, counts, repetition, presence, frequency, size, stride, PAIRS: tl.constexpr):
    """As `penalize_`, some pairs of row and token a program."""
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    is_pair = pair < size
    place = (
        logits + tl.load(rows + pair, mask=is_pair, other=0) * stride + tl.load(tokens + pair, mask=is_pair, other=0)
    )
    logit = tl.load(place, mask=is_pair, other=0.0)
    factor = tl.load(repetition + pair, mask=is_pair, other=1.0)
    count = tl.load(counts + pair, mask=is_pair, other=0).to(tl.float32)
    logit = tl.where(logit > 0, logit / factor, logit * factor)
    logit -= tl.load(frequency + pair, mask=is_pair, other=0.0) * count
    logit -= tl.where(count > 0, tl.load(presence + pair, mask=is_pair, other=0.0), 0.0)
    tl.store(place, logit, mask=is_pair)


@triton.jit
def bit_mask_kernel(logits, bit_mask, vocab_size, stride, mask_stride, COLUMNS: tl.constexpr):
    """One program is a row and `COLUMNS` of its tokens."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < vocab_size
    word = tl.load(bit_mask + row * mask_stride + column // 32, mask=is_column, other=-1)
    is_refused = ((word >> (column % 32)) & 1) == 0
    tl.store(logits + row * stride + column, float("-inf"), mask=is_column & is_refused)
