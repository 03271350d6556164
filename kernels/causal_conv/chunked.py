"""The torch path: lone tokens all at once, longer sequences one by one."""

import torch
from torch import Tensor
from torch.nn import functional

from ..recurrent_states import StateSlots


def causal_conv_chunked(
    x: Tensor, weight: Tensor, states: Tensor, slots: StateSlots, *, bias: Tensor | None = None, silu: bool = True
) -> Tensor:
    """See `causal_conv`."""
    output = torch.empty_like(x, memory_format=torch.contiguous_format)
    places, read, write = slots.lone_tokens
    if len(places):
        inputs = torch.cat((states[read], x[places].unsqueeze(1)), dim=1)
        states[write] = inputs[:, 1:]
        output[places] = _convolve(inputs, weight, bias, silu)[:, 0].to(x.dtype)
    for start, length, read_slot, write_slot in slots.longer:
        inputs = torch.cat((states[read_slot], x[start : start + length]))
        states[write_slot] = inputs[length:]
        output[start : start + length] = _convolve(inputs, weight, bias, silu)
    return output


def _convolve(inputs: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    """inputs: [..., num_tokens + width - 1, num_channels]. Returns [..., num_tokens, num_channels] float32."""
    wide, width = inputs.float(), weight.shape[1]
    num_tokens = inputs.shape[-2] - width + 1
    total = torch.zeros_like(wide[..., :num_tokens, :])
    for nth, factors in enumerate(weight.float().unbind(1)):
        total.addcmul_(wide[..., nth : nth + num_tokens, :], factors)
    if bias is not None:
        total += bias
    return functional.silu(total) if silu else total
