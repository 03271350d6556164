"""LayerNorm on the GPU; numbers are float32 between loading and storing."""

import triton
import triton.language as tl

from ..triton_early_launch import wait_for_inputs


@triton.jit
def layer_norm_kernel(
    output,
    x,
    residual,
    weight,
    bias,
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
    # On their way while the sums are made.
    factors = tl.load(weight + column, mask=is_column, other=0.0).to(tl.float32)
    offsets = tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        stream = residual + row * residual_stride + column
        summed = (wide + tl.load(stream, mask=is_column, other=0.0).to(tl.float32)).to(residual.dtype.element_ty)
        tl.store(stream, summed, mask=is_column)
        wide = summed.to(tl.float32)
    # The variance of what is left of the mean: the mean of squares would lose it where the mean is large.
    centred = tl.where(is_column, wide - tl.sum(wide, 0) / size, 0.0)
    scaled = centred * tl.rsqrt(tl.sum(centred * centred, 0) / size + eps)
    tl.store(output + row * size + column, (scaled * factors + offsets).to(output.dtype.element_ty), mask=is_column)
