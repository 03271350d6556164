"""Gated activations on the GPU; numbers are float32 between loading and storing."""

import triton
import triton.language as tl

from ..triton_early_launch import wait_for_inputs

SQRT_8_OVER_PI = tl.constexpr(1.5957691216057308)


@triton.jit
def gate_kernel(
    output, gate_up, size, gate_up_stride, IS_SILU: tl.constexpr, COLUMNS: tl.constexpr, IS_EARLY: tl.constexpr
):
    """One program is a row and `COLUMNS` of its outputs."""
    wait_for_inputs(IS_EARLY)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < size
    gate = tl.load(gate_up + row * gate_up_stride + column, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * gate_up_stride + size + column, mask=is_column, other=0.0).to(tl.float32)
    tl.store(output + row * size + column, gated(gate, up, IS_SILU, output.dtype.element_ty), mask=is_column)


@triton.jit
def clamped_kernel(output, gate_up, size, gate_up_stride, limit, alpha, COLUMNS: tl.constexpr, IS_EARLY: tl.constexpr):
    """One program is a row and `COLUMNS` of its outputs; a gate and its up are in turns."""
    wait_for_inputs(IS_EARLY)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < size
    pair = gate_up + row * gate_up_stride + 2 * column
    gate = tl.load(pair, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(pair + 1, mask=is_column, other=0.0).to(tl.float32)
    # Comparisons that a number that is none passes through.
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    result = (up + 1) * gate * tl.sigmoid(alpha * gate)
    tl.store(output + row * size + column, result.to(output.dtype.element_ty), mask=is_column)


@triton.jit
def gated(gate, up, IS_SILU: tl.constexpr, dtype: tl.constexpr):
    """activation(gate) * up of float32, as numbers of `dtype`."""
    if IS_SILU:
        activated = gate * tl.sigmoid(gate)
    else:
        # 0.5 * (1 + tanh(x)) is sigmoid(2 * x).
        activated = gate * tl.sigmoid((gate + 0.044715 * gate * gate * gate) * SQRT_8_OVER_PI)
    # Rounded before it is multiplied, as the reference does.
    return (activated.to(dtype).to(tl.float32) * up).to(dtype)
