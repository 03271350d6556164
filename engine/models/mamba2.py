"""Mamba-2 where other layers attend: what it knows of a sequence is a state, not keys and values."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import silu

from ...kernels.causal_conv import causal_conv
from ...kernels.linear import Linear
from ...kernels.mamba2 import grouped_gated_rms_norm, selective_scan
from ..checkpoints.cut import OF_OUTPUTS
from ..checkpoints.state_layers import Mamba2Config
from ..checkpoints.weights import WeightSlot
from .blocks import BlankWeights, Step, linear_slots
from .state_mixer import StateMixer


class Mamba2(StateMixer):
    """See `StateMixer`."""

    def __init__(self, blank: BlankWeights, shape: Mamba2Config) -> None:
        config = blank.config
        self._ranks = blank.ranks
        self._shape = shape
        self._eps = config.rms_norm_eps
        self.inputs = blank.linear(["in_proj"], [sum(shape.input_sizes)], config.hidden_size, shape.has_bias)
        self.output = blank.linear(["out_proj"], [config.hidden_size], shape.inner_size, shape.has_bias)
        self.conv_weight = torch.empty(shape.mixed_size, shape.conv_width, dtype=blank.dtype, device=blank.device)
        self.conv_bias = self.conv_weight.new_empty(shape.mixed_size) if shape.has_conv_bias else None
        self.decay_scale = torch.empty(shape.num_heads, dtype=torch.float32, device=blank.device)
        self.dt_bias = torch.empty_like(self.decay_scale)
        self.skip = torch.empty_like(self.decay_scale)
        self.norm = self.conv_weight.new_empty(shape.inner_size) if shape.has_norm else None
        self._input_scales = None if shape.input_scales is None else self._spread(shape.input_scales)

    def _spread(self, scales: tuple[float, ...]) -> Tensor:
        """Each as often as its part has outputs, rounded as the weights are."""
        parts = zip(self._shape.input_parts, scales, strict=True)
        return torch.cat([self.conv_weight.new_full((size,), scale) for size, scale in parts])

    def __call__(self, x: Tensor, conv_states: Tensor, states: Tensor, step: Step) -> Tensor:
        assert step.states is not None
        shape, slots = self._shape, step.states
        inputs = self.inputs(x)
        if self._input_scales is not None:
            inputs *= self._input_scales
        gates, mixed, dt = inputs.split_with_sizes(shape.input_sizes, dim=1)
        mixed = causal_conv(mixed, self.conv_weight, conv_states, slots, bias=self.conv_bias)
        scales = (self.decay_scale, self.dt_bias, self.skip)
        read = selective_scan(mixed, dt, *scales, states, slots, dt_limits=shape.dt_limits).flatten(1)
        if step.wanted is not None:
            read, gates = read[step.wanted], gates[step.wanted]
        return self._ranks.sum(self.output(self._gated(read, gates)))

    def _gated(self, read: Tensor, gates: Tensor) -> Tensor:
        if self.norm is None:
            return silu(gates).mul_(read)
        return grouped_gated_rms_norm(read, gates, self.norm, self._eps, self._shape.num_groups)

    def projections(self) -> Iterator[Linear]:
        yield self.inputs
        yield self.output

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield from linear_slots(self.inputs, [f"{prefix}.in_proj"])
        yield from linear_slots(self.output, [f"{prefix}.out_proj"])
        yield WeightSlot(f"{prefix}.conv1d.weight", self.conv_weight.unsqueeze(1), axes=OF_OUTPUTS)
        if self.conv_bias is not None:
            yield WeightSlot(f"{prefix}.conv1d.bias", self.conv_bias, axes=OF_OUTPUTS)
        yield WeightSlot(f"{prefix}.A_log", self.decay_scale, axes=OF_OUTPUTS)
        yield WeightSlot(f"{prefix}.dt_bias", self.dt_bias, axes=OF_OUTPUTS)
        yield WeightSlot(f"{prefix}.D", self.skip, axes=OF_OUTPUTS)
        if self.norm is not None:
            yield WeightSlot(f"{prefix}.norm.weight", self.norm, axes=OF_OUTPUTS)
