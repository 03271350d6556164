"""From logits to tokens on the GPU, without sorting the vocabulary.

What top-k and top-p keep is all from some logit on. Each pass over the logits tries four bounds for it, until about as
few lie between two of them as fit into registers. Those are written down, and the search ends among them by bisection
over the floats' bit patterns, which as integers have the floats' order, with jumps to the nearest logits there are.
"""

import triton
import triton.language as tl

from ..triton_early_launch import wait_for_inputs

LOG2_E = tl.constexpr(1.4426950408889634)
LEAST_INT = tl.constexpr(-(2**31))
LARGEST_FLOAT = tl.constexpr(3.0e38)
# Pieces of a row that are under way at a time: what a pass takes is otherwise the waiting for one after the other.
STAGES = tl.constexpr(4)
# Neighbours that one thread loads at a time: 16 bytes of them.
TOGETHER = tl.constexpr(8)
HALF_WORD = tl.constexpr(2.0**-32)
# Of what lies between two bounds a lane has room for so many, and all are written down where that is more than enough.
LIST = tl.constexpr(16)
LISTED = tl.constexpr(5.0)
# How far below the peak the first bounds are, in units that a search is given.
NEAR, FAR, FURTHEST = tl.constexpr(1.0), tl.constexpr(3.0), tl.constexpr(7.0)
# After so many passes bounds are spaced by bit patterns: that ends however logits are spread.
EVEN_PASSES = tl.constexpr(6)
# What top-k's threshold is about as far below the peak as, whatever the temperature.
LOGIT_UNIT = tl.constexpr(2.0)


@triton.jit
def sample_kernel(
    tokens,
    lists,
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
    """One program a row, which has its largest logit at `likeliest`. PIECES: how many of `COLUMNS` it has, or more.

    lists: [num_rows, LIST * COLUMNS // TOGETHER] float32, to be overwritten.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    lists += row * LIST * (COLUMNS // TOGETHER)
    peak = tl.load(logits + tl.load(likeliest + row)).to(tl.float32)
    # A difference of zero must stay zero, however small the temperature: no infinite factor.
    factor = tl.minimum(1.0 / tl.load(temperature + row) * LOG2_E, LARGEST_FLOAT).to(tl.float32)

    least = tl.full([], float("-inf"), tl.float32)
    ties = tl.full([], 0.0, tl.float64)
    k = tl.load(top_k + row)
    p = tl.load(top_p + row)
    if (k > 0) & (k < vocab_size):
        limit = k.to(tl.float64)
        least, count = _least_kept(
            logits, lists, vocab_size, peak, factor, limit, ties, least, least, LOGIT_UNIT, True, COLUMNS
        )
        # Of the tokens equal to the k-th, the first k have their share of the mass, and no more.
        ties = (limit - count) * _weight(least, peak, factor).to(tl.float64)
    if p < 1.0:
        # All below have less than 1 - p together, where the likeliest alone has 1: top-p keeps none of them.
        hopeless = peak - (1.0 + tl.log2((vocab_size / (1.0 - p)).to(tl.float32))) / factor
        least, _ = _least_kept(
            logits, lists, vocab_size, peak, factor, p, ties, least, hopeless, LOG2_E / factor, False, COLUMNS
        )

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
def _least_kept(
    logits,
    lists,
    vocab_size,
    peak,
    factor,
    limit,
    ties,
    floor,
    hopeless,
    unit,
    BY_COUNT: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The least float at or above `floor` and `hopeless` over which there is less than `limit`, and how much there is.

    BY_COUNT: in number. Else in weight, and `limit` is the share of what there is above the floor and of `ties`.
    """
    failing = _key(floor).to(tl.int64) - 1
    passing = _key(peak).to(tl.int64)
    above_failing = tl.full([], float("inf"), tl.float64)
    above_passing = tl.full([], 0.0, tl.float64)
    one = _key(peak - unit * NEAR).to(tl.int64)
    two = _key(peak - unit * FAR).to(tl.int64)
    three = _key(peak - unit * FURTHEST).to(tl.int64)
    four = _key(floor).to(tl.int64)
    number = 0
    while passing - failing > 1:
        if number > 0:
            one = _between(failing, passing, peak, 1, number)
            two = _between(failing, passing, peak, 2, number)
            three = _between(failing, passing, peak, 3, number)
            four = _between(failing, passing, peak, 4, number)
        one = tl.minimum(tl.maximum(one, failing + 1), passing - 1)
        two = tl.minimum(tl.maximum(two, failing + 1), passing - 1)
        three = tl.minimum(tl.maximum(three, failing + 1), passing - 1)
        four = tl.minimum(tl.maximum(four, failing + 1), passing - 1)
        of_one, of_two, of_three, of_four = _amounts_above(
            logits, vocab_size, peak, factor, _float(one), _float(two), _float(three), _float(four), BY_COUNT, COLUMNS
        )
        if not BY_COUNT:
            limit = tl.where(number == 0, limit * (of_four + ties), limit)
        failing, passing, above_failing, above_passing = _narrowed(
            failing, passing, above_failing, above_passing, one, of_one, limit
        )
        failing, passing, above_failing, above_passing = _narrowed(
            failing, passing, above_failing, above_passing, two, of_two, limit
        )
        failing, passing, above_failing, above_passing = _narrowed(
            failing, passing, above_failing, above_passing, three, of_three, limit
        )
        failing, passing, above_failing, above_passing = _narrowed(
            failing, passing, above_failing, above_passing, four, of_four, limit
        )
        failing = tl.minimum(tl.maximum(failing, _key(hopeless).to(tl.int64) - 1), passing - 1)
        number += 1
        # At the most as many lie between as have the weight together, if each has the least.
        listable = tl.full([], LISTED * (COLUMNS // TOGETHER), tl.float32)
        if not BY_COUNT:
            listable *= _weight(_float(failing), peak, factor)
        is_listed = (passing - failing > 1) & (above_failing - above_passing <= listable)
        if is_listed:
            is_listed = _write_lists(lists, logits, vocab_size, failing, passing, COLUMNS) <= LIST
        if is_listed:
            passing, above_passing = _least_listed(
                lists, peak, factor, limit, failing, passing, above_passing, BY_COUNT, COLUMNS
            )
            failing = passing - 1
    return _float(passing), above_passing


@triton.jit
def _between(failing, passing, peak, place, number):
    """One of four keys between two: evenly by value, where that has no end as far again as the peak is."""
    low, high = _float(failing), _float(passing)
    low = tl.where(low > float("-inf"), low, high - 5.0 * (peak - high))
    by_value = _key(low + (high - low) * (place / 5.0)).to(tl.int64)
    by_bits = failing + ((passing - failing) * (2 * place - 1) >> 3)
    return tl.where(number < EVEN_PASSES, by_value, by_bits)


@triton.jit
def _narrowed(failing, passing, above_failing, above_passing, key, amount, limit):
    """The nearest keys that fail and pass, and the amounts above them, when that above `key` is known as well."""
    is_closer = (key > failing) & (key < passing)
    # What is no number passes nothing.
    is_passing = is_closer & (amount < limit)
    is_failing = is_closer & (is_passing == 0)
    above_passing = tl.where(is_passing, amount, above_passing)
    above_failing = tl.where(is_failing, amount, above_failing)
    passing = tl.where(is_passing, key, passing)
    failing = tl.where(is_failing, key, failing)
    return failing, passing, above_failing, above_passing


@triton.jit
def _amounts_above(
    logits, vocab_size, peak, factor, one, two, three, four, BY_COUNT: tl.constexpr, COLUMNS: tl.constexpr
):
    """The number, or the weight, of the tokens above each of four logits."""
    column = tl.arange(0, COLUMNS)
    # Of each piece a thread has neighbours, and keeps one of each number for all of them: registers are scarce.
    of_one = tl.zeros([COLUMNS // TOGETHER], tl.float32)
    of_two = tl.zeros([COLUMNS // TOGETHER], tl.float32)
    of_three = tl.zeros([COLUMNS // TOGETHER], tl.float32)
    of_four = tl.zeros([COLUMNS // TOGETHER], tl.float32)
    for start in tl.range(0, vocab_size, COLUMNS, num_stages=STAGES):
        logit = _neighbours(_load(logits, start + column, vocab_size), COLUMNS)
        weight = 1.0 if BY_COUNT else _weight(logit, peak, factor)
        of_one += tl.sum(tl.where(logit > one, weight, 0.0), 1)
        of_two += tl.sum(tl.where(logit > two, weight, 0.0), 1)
        of_three += tl.sum(tl.where(logit > three, weight, 0.0), 1)
        of_four += tl.sum(tl.where(logit > four, weight, 0.0), 1)
    return (
        tl.sum(of_one.to(tl.float64), 0),
        tl.sum(of_two.to(tl.float64), 0),
        tl.sum(of_three.to(tl.float64), 0),
        tl.sum(of_four.to(tl.float64), 0),
    )


@triton.jit
def _write_lists(lists, logits, vocab_size, failing, passing, COLUMNS: tl.constexpr):
    """Write each lane's logits above one key and up to another down. Returns how many the fullest lane has.

    A lane has a place in each piece. Where it has less than `LIST`, or more, the rest is -inf, or left out.
    """
    # What was read of earlier ones.
    tl.debug_barrier()
    tl.store(lists + tl.arange(0, LIST * (COLUMNS // TOGETHER)), float("-inf"))
    tl.debug_barrier()
    column = tl.arange(0, COLUMNS)
    filled = tl.zeros([COLUMNS // TOGETHER], tl.int32)
    of_lane = lists + tl.arange(0, COLUMNS // TOGETHER)[:, None]
    for start in tl.range(0, vocab_size, COLUMNS, num_stages=STAGES):
        logit = _neighbours(_load(logits, start + column, vocab_size), COLUMNS)
        key = _key(logit)
        # Below -inf's key there is one of a NaN.
        is_between = ((key > failing.to(tl.int32)) & (key <= passing.to(tl.int32))).to(tl.int32)
        entry = filled[:, None] + tl.cumsum(is_between, 1) - is_between
        tl.store(of_lane + entry * (COLUMNS // TOGETHER), logit, mask=(is_between > 0) & (entry < LIST))
        filled += tl.sum(is_between, 1)
    # Others' are read.
    tl.debug_barrier()
    return tl.max(filled, 0)


@triton.jit
def _least_listed(
    lists, peak, factor, limit, failing, passing, above_passing, BY_COUNT: tl.constexpr, COLUMNS: tl.constexpr
):
    """What `_least_kept` looks for, as a key, when all between two keys is listed; and how much there is above it."""
    logit = tl.load(lists + tl.arange(0, LIST * (COLUMNS // TOGETHER)))
    weight = 1.0 if BY_COUNT else _weight(logit, peak, factor)
    above_list = above_passing
    while passing - failing > 1:
        middle = (failing + passing) >> 1
        is_above = logit > _float(middle)
        amount = above_list + tl.sum(tl.where(is_above, weight, 0.0), 0).to(tl.float64)
        # On to the next float that some token has, which changes nothing about what is above.
        below = tl.max(tl.where(is_above, float("-inf"), logit), 0)
        above = tl.min(tl.where(is_above, logit, float("inf")), 0)
        next_below = tl.maximum(tl.minimum(_key(below).to(tl.int64), middle), failing + 1)
        next_above = tl.minimum(tl.maximum(_key(above).to(tl.int64) - 1, middle), passing - 1)
        is_passing = amount < limit
        above_passing = tl.where(is_passing, amount, above_passing)
        passing = tl.where(is_passing, next_below, passing)
        failing = tl.where(is_passing, failing, next_above)
    return passing, above_passing


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
    tokens,
    highest_logits,
    log_sum_exps,
    logits,
    vocab_size,
    stride,
    HAS_LSE: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """One program a row: its first largest logit, and the log of the sum of the exponentials."""
    wait_for_inputs(IS_EARLY)
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
