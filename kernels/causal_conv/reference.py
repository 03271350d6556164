"""The obvious torch."""

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import conv1d

from ..recurrent_states import StateSlots


def causal_conv_reference(
    x: Tensor, weight: Tensor, states: Tensor, slots: StateSlots, *, bias: Tensor | None = None, silu: bool = True
) -> Tensor:
    """See `causal_conv`."""
    outputs = []
    for start, length, read, write in slots.spans:
        inputs = torch.cat((states[read], x[start : start + length]))
        states[write] = inputs[length:]
        convolved = conv1d(inputs.T.unsqueeze(0), weight.unsqueeze(1), bias, groups=x.shape[1])[0].T
        outputs.append(functional.silu(convolved) if silu else convolved)
    return torch.cat(outputs)
