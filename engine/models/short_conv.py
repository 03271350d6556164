"""A gated convolution where other layers attend: of a sequence it knows the latest tokens alone (LFM2)."""

from collections.abc import Iterator

import torch
from torch import Tensor

from ...kernels.causal_conv import causal_conv
from ...kernels.linear import Linear
from ..checkpoints.cut import OF_OUTPUTS
from ..checkpoints.state_layers import ShortConvConfig
from ..checkpoints.weights import WeightSlot
from .blocks import BlankWeights, Step, linear_slots
from .state_mixer import StateMixer


class ShortConv(StateMixer):
    """See `StateMixer`. Its recurrent states are empty."""

    def __init__(self, blank: BlankWeights, shape: ShortConvConfig) -> None:
        size, hidden_size = shape.size, blank.config.hidden_size
        self._ranks = blank.ranks
        # Side by side what gates the convolution's inputs, what gates its outputs, and the inputs.
        self.inputs = blank.linear(["in_proj"], [3 * size], hidden_size, shape.has_bias)
        self.output = blank.linear(["out_proj"], [hidden_size], size, shape.has_bias)
        self.weight = torch.empty(size, shape.conv_width, dtype=blank.dtype, device=blank.device)
        self.bias = torch.empty(size, dtype=blank.dtype, device=blank.device) if shape.has_bias else None

    def __call__(self, x: Tensor, conv_states: Tensor, states: Tensor, step: Step) -> Tensor:
        assert step.states is not None
        before, after, mixed = self.inputs(x).chunk(3, dim=1)
        mixed = causal_conv(before * mixed, self.weight, conv_states, step.states, bias=self.bias, silu=False)
        if step.wanted is not None:
            mixed, after = mixed[step.wanted], after[step.wanted]
        return self._ranks.sum(self.output(after * mixed))

    def projections(self) -> Iterator[Linear]:
        yield self.inputs
        yield self.output

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield from linear_slots(self.inputs, [f"{prefix}.in_proj"])
        yield from linear_slots(self.output, [f"{prefix}.out_proj"])
        yield WeightSlot(f"{prefix}.conv.weight", self.weight.unsqueeze(1), axes=OF_OUTPUTS)
        if self.bias is not None:
            yield WeightSlot(f"{prefix}.conv.bias", self.bias, axes=OF_OUTPUTS)
