"""Short convolutions on the GPU; numbers are float32 between loading and storing."""

import triton
import triton.language as tl

from ..recurrent_states.triton_kernels import TILE_SIZE, sequence_of
from ..triton_early_launch import wait_for_inputs


@triton.jit
def causal_conv_kernel(
    output,
    states,
    x,
    weight,
    bias,
    sequences,
    tiles,
    num_channels,
    x_stride,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SILU: tl.constexpr,
    PADDED_ENTRIES: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """One program is a tile of a sequence's tokens and `CHANNELS` channels; the first tile's writes the state."""
    wait_for_inputs(IS_EARLY)
    tile = tiles + tl.program_id(0) * TILE_SIZE
    start, length, read, write = sequence_of(sequences, tl.load(tile))
    first = tl.load(tile + 1)
    if first < length:
        channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
        is_channel = channel < num_channels
        entries: tl.constexpr = WIDTH - 1
        own = x + start * x_stride + channel[None, :]
        before = states + read * entries * num_channels + channel[None, :]
        token = first + tl.arange(0, TOKENS)
        is_wanted = (token < length)[:, None] & is_channel[None, :]
        total = tl.zeros((TOKENS, CHANNELS), dtype=tl.float32)
        for nth in tl.static_range(WIDTH):
            inputs = _inputs(own, before, token - entries + nth, is_wanted, x_stride, num_channels, entries)
            factors = tl.load(weight + channel * WIDTH + nth, mask=is_channel, other=0.0).to(tl.float32)
            total += inputs.to(tl.float32) * factors[None, :]
        if HAS_BIAS:
            total += tl.load(bias + channel, mask=is_channel, other=0.0).to(tl.float32)[None, :]
        if HAS_SILU:
            total *= tl.sigmoid(total)
        place = output + (start + token)[:, None] * num_channels + channel[None, :]
        tl.store(place, total.to(output.dtype.element_ty), mask=is_wanted)
        if first == 0:
            entry = tl.arange(0, PADDED_ENTRIES)
            is_entry = (entry < entries)[:, None] & is_channel[None, :]
            latest = _inputs(own, before, length - entries + entry, is_entry, x_stride, num_channels, entries)
            # All threads have read what may be written now.
            tl.debug_barrier()
            after = states + (write * entries + entry)[:, None] * num_channels + channel[None, :]
            tl.store(after, latest, mask=is_entry)


@triton.jit
def _inputs(own, before, place, is_wanted, x_stride, num_channels, entries: tl.constexpr):
    """A sequence's inputs at these places, of which those before its first token are the state's entries."""
    is_own = place >= 0
    fresh = tl.load(own + place.to(tl.int64)[:, None] * x_stride, mask=is_own[:, None] & is_wanted, other=0.0)
    entry = (place + entries)[:, None] * num_channels
    return tl.where(is_own[:, None], fresh, tl.load(before + entry, mask=~is_own[:, None] & is_wanted, other=0.0))
