"""From logits to tokens on the GPU, without sorting the vocabulary.

What top-k and top-p keep is all from some logit on. That logit is found by bisection over the floats' bit patterns,
which as integers have the floats' order; each pass also jumps to the nearest logits that there are, so that a search
ends after about as many passes as the number of logits in question has bits.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LEAST_INT = tl.constexpr(-(2**31))
LARGEST_FLOAT = tl.constexpr(3.0e38)
# Pieces of a row that are under way at a time: what a pass takes is otherwise the waiting for one after the other.
STAGES = tl.constexpr(4)
# Neighbours that one thread loads at a time: 16 bytes of them.
TOGETHER = tl.constexpr(8)
HALF_WORD = tl.constexpr(2.0**-32)


@triton.jit
def sample_kernel(
    tokens,
    logits,
    likeliest,
    temperature,
    top_k,
    top_p,
    min_p,
    uniforms,
    vocab_size,
    stride,
    COLUMNS: tl.constexpr,
    PIECES: tl.constexpr,
):
    """One program a row, which has its largest logit at `likeliest`. PIECES: how many of `COLUMNS` it has, or more."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    peak = tl.load(logits + tl.load(likeliest + row)).to(tl.float32)
    # A difference of zero must stay zero, however small the temperature: no infinite factor.
    factor = tl.minimum(1.0 / tl.load(temperature + row) * LOG2_E, LARGEST_FLOAT).to(tl.float32)

    least = tl.full([], float("-inf"), tl.float32)
    k = tl.load(top_k + row)
    p = tl.load(top_p + row)
    if (k > 0) & (k < vocab_size):
        least = _least_kept(logits, vocab_size, peak, factor, k.to(tl.float64), least, True, COLUMNS)
    if p < 1.0:
        count, mass = _above(logits, vocab_size, peak, factor, least, COLUMNS)
        if (k > 0) & (k < vocab_size):
            # Of the tokens equal to the k-th, the first k have their share of the mass, and no more.
            mass += (k - count) * _weight(least, peak, factor).to(tl.float64)
        # All below have less than 1 - p together, where the likeliest alone has 1: top-p keeps none of them.
        hopeless = peak - (1.0 + tl.log2((vocab_size / (1.0 - p)).to(tl.float32))) / factor
        least = tl.maximum(least, hopeless)
        least = _least_kept(logits, vocab_size, peak, factor, p * mass, least, False, COLUMNS)

    smallest_weight = tl.load(min_p + row).to(tl.float32)
    column = tl.arange(0, COLUMNS)
    piece = tl.arange(0, PIECES)
    masses = tl.zeros([PIECES], tl.float32)
    for start in tl.range(0, vocab_size, COLUMNS, num_stages=STAGES):
        weights = _kept_weights(logits, start + column, vocab_size, peak, factor, least, smallest_weight)
        masses = tl.where(piece == start // COLUMNS, tl.sum(weights, 0), masses)

    # The piece that the target lies in, of that the neighbours, of those the token.
    target = tl.load(uniforms + row) * tl.sum(masses.to(tl.float64), 0)
    place, before = _crossing(masses, target * 0.0, target, PIECES)
    first = place * COLUMNS
    weights = _kept_weights(logits, first + column, vocab_size, peak, factor, least, smallest_weight)
    sums = tl.sum(_neighbours(weights, COLUMNS), 1)
    place, before = _crossing(sums, before, target, COLUMNS // TOGETHER)
    first += place * TOGETHER
    neighbour = tl.arange(0, TOGETHER)
    weights = _kept_weights(logits, first + neighbour, vocab_size, peak, factor, least, smallest_weight)
    place, before = _crossing(weights, before, target, TOGETHER)
    tl.store(tokens + row, (first + place).to(tl.int64))


@triton.jit
def _crossing(weights, before, target, SIZE: tl.constexpr):
    """Where the cumulative sum, of `before` and the weights, reaches the target, and what the sum is before that.

    Where rounding leaves the sum below the target the last place that has a weight stands in; 0 where none has any.
    """
    place = tl.arange(0, SIZE)
    cumulative = before + tl.cumsum(weights.to(tl.float64), 0)
    crossing = tl.min(tl.where((weights > 0) & (cumulative >= target), place, SIZE), 0)
    last = tl.max(tl.where(weights > 0, place, 0), 0)
    crossing = tl.where(crossing < SIZE, crossing, last)
    return crossing, before + tl.sum(tl.where(place < crossing, weights, 0.0).to(tl.float64), 0)


@triton.jit
def _least_kept(logits, vocab_size, peak, factor, limit, floor, BY_COUNT: tl.constexpr, COLUMNS: tl.constexpr):
    """The least float at or above `floor` over which there is less than `limit`, in number or in weight."""
    column = tl.arange(0, COLUMNS)
    failing = _key(floor).to(tl.int64) - 1
    passing = _key(peak).to(tl.int64)
    while passing - failing > 1:
        middle = (failing + passing) >> 1
        bound = _float(middle)
        # Of each piece a thread has neighbours, and keeps one of each number for all of them: registers are scarce.
        amount = tl.zeros([COLUMNS // TOGETHER], tl.float32)
        below = tl.full([COLUMNS // TOGETHER], float("-inf"), tl.float32)
        above = tl.full([COLUMNS // TOGETHER], float("inf"), tl.float32)
        for start in tl.range(0, vocab_size, COLUMNS, num_stages=STAGES):
            logit = _neighbours(_load(logits, start + column, vocab_size), COLUMNS)
            is_above = logit > bound
            amount += tl.sum(tl.where(is_above, 1.0 if BY_COUNT else _weight(logit, peak, factor), 0.0), 1)
            below = tl.maximum(below, tl.max(tl.where(is_above, float("-inf"), logit), 1))
            above = tl.minimum(above, tl.min(tl.where(is_above, logit, float("inf")), 1))
        is_passing = tl.sum(amount.to(tl.float64), 0) < limit
        # On to the next float that some token has, which changes nothing about what is above; with a NaN at least on.
        next_below = tl.minimum(_key(tl.max(below, 0)).to(tl.int64), middle)
        next_above = tl.maximum(_key(tl.min(above, 0)).to(tl.int64) - 1, middle)
        passing = tl.where(is_passing, tl.maximum(next_below, failing + 1), passing)
        failing = tl.where(is_passing, failing, next_above)
    return _float(passing)


@triton.jit
def _above(logits, vocab_size, peak, factor, bound, COLUMNS: tl.constexpr):
    """The number and the weight of the tokens above a logit."""
    column = tl.arange(0, COLUMNS)
    counts = tl.zeros([COLUMNS // TOGETHER], tl.int32)
    weights = tl.zeros([COLUMNS // TOGETHER], tl.float32)
    for start in tl.range(0, vocab_size, COLUMNS, num_stages=STAGES):
        logit = _neighbours(_load(logits, start + column, vocab_size), COLUMNS)
        is_above = logit > bound
        counts += tl.sum(is_above.to(tl.int32), 1)
        weights += tl.sum(tl.where(is_above, _weight(logit, peak, factor), 0.0), 1)
    return tl.sum(counts, 0), tl.sum(weights.to(tl.float64), 0)


@triton.jit
def _kept_weights(logits, column, vocab_size, peak, factor, least, smallest_weight):
    """Each token's weight; zero for those that are not kept."""
    logit = _load(logits, column, vocab_size)
    weight = _weight(logit, peak, factor)
    return tl.where((logit >= least) & (weight >= smallest_weight), weight, 0.0)


@triton.jit
def _weight(logit, peak, factor):
    """A token's probability over that of the likeliest. factor: log2(e) / temperature, as powers of two are taken."""
    return tl.exp2((logit - peak) * factor)


@triton.jit
def _neighbours(numbers, COLUMNS: tl.constexpr):
    """What a thread loads at a time beside each other: [COLUMNS / TOGETHER, TOGETHER]."""
    return tl.reshape(numbers, [COLUMNS // TOGETHER, TOGETHER])


@triton.jit
def _load(logits, column, vocab_size):
    return tl.load(logits + column, mask=column < vocab_size, other=float("-inf")).to(tl.float32)


@triton.jit
def _key(logit):
    """int32 in the order of the floats. Both zeros have one key, as they are one number."""
    bits = logit.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, LEAST_INT - bits, bits)


@triton.jit
def _float(key):
    """The float that has the key."""
    word = key.to(tl.int32)
    return tl.where(word < 0, LEAST_INT - word, word).to(tl.float32, bitcast=True)


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
        logit = _neighbours(_load(logits, start + column, vocab_size), COLUMNS)
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
def bit_mask_kernel(logits, bit_mask, vocab_size, stride, mask_stride, WORDS: tl.constexpr):
    """One program is a row and the tokens of `WORDS` words."""
    row = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    bits = tl.load(bit_mask + row * mask_stride + word, mask=word * 32 < vocab_size, other=-1)[:, None]
    bit = tl.arange(0, 32)[None, :]
    column = word[:, None] * 32 + bit
    place = logits + row * stride + column
    # What is stored alone, word by word, would be stored number by number: so the logits between come along.
    kept = tl.load(place, mask=(bits != 0) & (column < vocab_size), other=0.0)
    masked = tl.where(((bits >> bit) & 1) == 0, float("-inf"), kept)
    tl.store(place, masked, mask=(bits != -1) & (column < vocab_size))
