"""A Gated DeltaNet where other layers attend: what it knows of a sequence is a state, not keys and values."""

from collections.abc import Iterator

import torch
from torch import Tensor

from ...kernels.causal_conv import causal_conv
from ...kernels.gated_delta import gated_delta_rule, gated_rms_norm
from ...kernels.linear import Linear
from ..checkpoints.cut import OF_OUTPUTS
from ..checkpoints.state_layers import GatedDeltaNetConfig
from ..checkpoints.weights import WeightSlot
from .blocks import BlankWeights, Step, linear_slots
from .state_mixer import StateMixer


class GatedDeltaNet(StateMixer):
    """See `StateMixer`."""

    def __init__(self, blank: BlankWeights, shape: GatedDeltaNetConfig) -> None:
        config = blank.config
        self._ranks = blank.ranks
        self._shape = shape
        self._eps = config.rms_norm_eps if shape.norm_eps is None else shape.norm_eps
        # What is mixed, and gates beside it; then what says how much is written, and how much of a state kept.
        self._names, self._sizes, self._orders = _inputs(shape)
        self._step_names, self._step_sizes, self._step_orders = _steps(shape)
        self.inputs = blank.linear(self._names, self._sizes, config.hidden_size, orders=self._orders)
        # A few outputs, whose errors a state would gather over all tokens: never in fewer bits.
        self.steps = blank.linear(
            self._step_names, self._step_sizes, config.hidden_size, quantizable=False, orders=self._step_orders
        )
        self.output = blank.linear([shape.names.output], [config.hidden_size], shape.value_size)
        self.conv_weight = torch.empty(shape.mixed_size, shape.conv_width, dtype=blank.dtype, device=blank.device)
        self.decay_scale = torch.empty(shape.num_heads, dtype=torch.float32, device=blank.device)
        self.decay_bias = torch.empty_like(self.decay_scale)
        self.norm = torch.empty(shape.value_dim, dtype=blank.dtype, device=blank.device)

    def __call__(self, x: Tensor, conv_states: Tensor, states: Tensor, step: Step) -> Tensor:
        assert step.states is not None
        shape = self._shape
        mixed, gates = self.inputs(x).split_with_sizes([shape.mixed_size, shape.value_size], dim=1)
        beta, decay = self.steps(x).split_with_sizes([shape.num_heads, shape.num_heads], dim=1)
        mixed = causal_conv(mixed, self.conv_weight, conv_states, step.states)
        scales = (self.decay_scale, self.decay_bias)
        read = gated_delta_rule(mixed, decay, beta, *scales, states, step.states, doubles_beta=shape.doubles_beta)
        if step.wanted is not None:
            read, gates = read[step.wanted], gates[step.wanted]
        return self._ranks.sum(self.output(gated_rms_norm(read, gates, self.norm, self._eps).flatten(1)))

    def projections(self) -> Iterator[Linear]:
        yield self.inputs
        yield self.steps
        yield self.output

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        called = self._shape.names
        yield from linear_slots(self.inputs, [f"{prefix}.{name}" for name in self._names], self._sizes, self._orders)
        names = [f"{prefix}.{name}" for name in self._step_names]
        yield from linear_slots(self.steps, names, self._step_sizes, self._step_orders)
        yield from linear_slots(self.output, [f"{prefix}.{called.output}"])
        parts = tuple(f"{prefix}.{name}.weight" for name in called.conv_parts)
        yield WeightSlot(f"{prefix}.conv1d.weight", self.conv_weight.unsqueeze(1), axes=OF_OUTPUTS, parts=parts)
        yield WeightSlot(f"{prefix}.A_log", self.decay_scale, axes=OF_OUTPUTS)
        yield WeightSlot(f"{prefix}.dt_bias", self.decay_bias, axes=OF_OUTPUTS)
        yield WeightSlot(f"{prefix}.{called.norm}.weight", self.norm)


def _inputs(shape: GatedDeltaNetConfig) -> tuple[list[str], list[int], list[Tensor | None]]:
    """Names, sizes and orders of what gives queries, keys, values and gates."""
    if not shape.is_grouped:
        return [*shape.names.mixed, shape.names.gates], [*shape.mixed_parts, shape.value_size], []
    values = shape.value_size // shape.num_key_heads
    order = _ungrouped(shape.num_key_heads, [shape.key_dim, shape.key_dim, values, values])
    return ["in_proj_qkvz"], [shape.mixed_size + shape.value_size], [order]


def _steps(shape: GatedDeltaNetConfig) -> tuple[list[str], list[int], list[Tensor | None]]:
    """Names, sizes and orders of what gives β, and what a state's decay is made of."""
    if not shape.is_grouped:
        return list(shape.names.steps), [shape.num_heads] * 2, []
    heads = shape.num_heads // shape.num_key_heads
    return ["in_proj_ba"], [2 * shape.num_heads], [_ungrouped(shape.num_key_heads, [heads, heads])]


def _ungrouped(num_groups: int, sizes: list[int]) -> Tensor:
    """Where each group has parts of these sizes side by side: the first ones of all groups, then the second ones."""
    places = torch.arange(num_groups * sum(sizes)).view(num_groups, -1)
    return torch.cat([part.flatten() for part in places.split_with_sizes(sizes, dim=1)])
