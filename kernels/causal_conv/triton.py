"""Short convolutions on the GPU: checks, and a launch."""

import torch
from torch import Tensor

from ..launch_sizes import cdiv, next_power_of_2
from ..recurrent_states import StateSlots
from ..triton_checks import FLOAT_DTYPES, check_launch, check_tensor
from ..triton_early_launch import early_launch
from .triton_kernels import causal_conv_kernel

MAX_WIDTH = 8
_CHANNELS_PER_PROGRAM = 256


def causal_conv_triton(
    x: Tensor, weight: Tensor, states: Tensor, slots: StateSlots, *, bias: Tensor | None = None, silu: bool = True
) -> Tensor:
    """See `causal_conv`. The launch depends on sizes alone, and never on whose state is where."""
    check_launch("x", x, causal_conv_kernel)
    num_tokens, num_channels, width = slots.num_tokens, *weight.shape
    check_tensor("x", x, (num_tokens, num_channels), FLOAT_DTYPES, x.device, is_contiguous=False)
    same = ((x.dtype,), x.device)
    check_tensor("weight", weight, (num_channels, None), *same)
    if not 2 <= width <= MAX_WIDTH:
        raise ValueError(f"weight {tuple(weight.shape)} must be of a width of 2 to {MAX_WIDTH}")
    check_tensor("states", states, (None, width - 1, num_channels), *same)
    if bias is not None:
        check_tensor("bias", bias, (num_channels,), *same)
    slots.check_device(x.device)
    output = torch.empty(num_tokens, num_channels, dtype=x.dtype, device=x.device)
    if not num_tokens:
        return output
    table = slots.table
    causal_conv_kernel[(table.num_tiles, cdiv(num_channels, _CHANNELS_PER_PROGRAM))](
        output,
        states,
        x,
        weight,
        weight if bias is None else bias,
        table.sequences,
        table.tiles,
        num_channels,
        x.stride(0),
        WIDTH=width,
        HAS_BIAS=bias is not None,
        HAS_SILU=silu,
        PADDED_ENTRIES=next_power_of_2(width - 1),
        TOKENS=table.tile_tokens,
        CHANNELS=_CHANNELS_PER_PROGRAM,
        num_warps=2 if table.tile_tokens == 1 else 4,
        **early_launch(x.device),
    )
    return output
