"""What the GPU's kernels of layers with states have in common."""

import triton
import triton.language as tl

# What a row of `SequenceTable`'s sequences and tiles has.
SEQUENCE_SIZE = tl.constexpr(4)
TILE_SIZE = tl.constexpr(2)


@triton.jit
def sequence_of(sequences, index):
    """The first token, the number of them, and both slots."""
    sequence = sequences + index * SEQUENCE_SIZE
    start, length = tl.load(sequence).to(tl.int64), tl.load(sequence + 1)
    return start, length, tl.load(sequence + 2).to(tl.int64), tl.load(sequence + 3).to(tl.int64)


@triton.jit
def softplus(x):
    """log(1 + e^x)."""
    small = tl.exp(-tl.abs(x))
    # log(1 + small), however small it is: 1 + small is rounded, and its logarithm scaled by how much.
    added = 1.0 + small - 1.0
    log1p = tl.where(added == 0.0, small, tl.log(1.0 + small) * (small / tl.where(added == 0.0, 1.0, added)))
    return tl.maximum(x, 0.0) + log1p
