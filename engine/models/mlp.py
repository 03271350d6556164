"""The MLP of a decoder layer, with a gate or without one."""

from collections.abc import Iterator

import torch
from torch import Tensor

from ...kernels.activation import gelu, gelu_tanh, gelu_tanh_and_mul, relu_squared, silu_and_mul, xielu
from ...kernels.linear import Activations, Linear, RowFormat
from ..checkpoints.model_config import MlpNames
from ..checkpoints.weights import WeightSlot
from ..sharding.ranks import ALONE
from .blocks import BlankWeights, linear_slots

ACTIVATIONS = {"silu": silu_and_mul, "gelu_tanh": gelu_tanh_and_mul}
_PLAIN_ACTIVATIONS = {"gelu": gelu, "gelu_tanh": gelu_tanh, "relu2": relu_squared}


class GatedMlp:
    """down(activation(gate) * up); gate and up are one matrix.

    Where ranks share it, it gives their sum, or of an expert, which `is_expert`, a rank's own part of that.
    """

    def __init__(
        self, blank: BlankWeights, inner_size: int, names: MlpNames, bias: bool = False, is_expert: bool = False
    ) -> None:
        self._ranks = ALONE if is_expert else blank.ranks
        hidden_size = blank.config.hidden_size
        self._gate_scale = blank.config.gate_scale
        self._activate = ACTIVATIONS[blank.config.activation]
        self._names = names
        size = 2 * inner_size // len(names.gate_up)
        self.gate_up = blank.linear(names.gate_up, [size] * len(names.gate_up), hidden_size, bias)
        self.down = blank.linear([names.down], [hidden_size], inner_size, bias)

    @property
    def row_format(self) -> RowFormat | None:
        """The form that it takes its input in best; see `Linear.row_format`."""
        return self.gate_up.row_format

    def __call__(self, x: Activations) -> Tensor:
        """x: [num_tokens, hidden_size]. Returns the same shape."""
        gate_up = self.gate_up(x)
        if self._gate_scale != 1:
            gate_up.chunk(2, dim=1)[0].mul_(self._gate_scale)
        return self._ranks.sum(self.down.gated(self._activate, gate_up))

    def projections(self) -> Iterator[Linear]:
        yield self.gate_up
        yield self.down

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield from linear_slots(self.gate_up, [f"{prefix}.{name}" for name in self._names.gate_up])
        yield from linear_slots(self.down, [f"{prefix}.{self._names.down}"])


class PlainMlp:
    """down(activation(up(x))); nothing is gated. Where ranks share it, it gives what `GatedMlp` does."""

    def __init__(
        self, blank: BlankWeights, inner_size: int, names: MlpNames, bias: bool = False, is_expert: bool = False
    ) -> None:
        self._ranks = ALONE if is_expert else blank.ranks
        hidden_size = blank.config.hidden_size
        self._names = names
        self._activation = blank.config.activation
        self.up = blank.linear(names.gate_up, [inner_size], hidden_size, bias)
        self.down = blank.linear([names.down], [hidden_size], inner_size, bias)

    @property
    def gate_up(self) -> Linear:
        """As experts with gates have it."""
        return self.up

    @property
    def row_format(self) -> RowFormat | None:
        """The form that it takes its input in best; see `Linear.row_format`."""
        return self.up.row_format

    def __call__(self, x: Activations) -> Tensor:
        """x: [num_tokens, hidden_size]. Returns the same shape."""
        return self._ranks.sum(self.down(self._activated(self.up(x))))

    def _activated(self, x: Tensor) -> Tensor:
        return _PLAIN_ACTIVATIONS[self._activation](x)

    def projections(self) -> Iterator[Linear]:
        yield self.up
        yield self.down

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield from linear_slots(self.up, [f"{prefix}.{name}" for name in self._names.gate_up])
        yield from linear_slots(self.down, [f"{prefix}.{self._names.down}"])


class XieluMlp(PlainMlp):
    """One whose activation is learnt, by four numbers."""

    def __init__(self, blank: BlankWeights, inner_size: int, names: MlpNames, bias: bool = False) -> None:
        super().__init__(blank, inner_size, names, bias)
        defaults = {"alpha_p": 0.0, "alpha_n": 0.0, "beta": 0.5, "eps": -1e-6}
        self._numbers = {
            name: torch.full((1,), number, dtype=blank.dtype, device=blank.device) for name, number in defaults.items()
        }

    def _activated(self, x: Tensor) -> Tensor:
        return xielu(x, **self._numbers)

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield from super().weight_slots(prefix)
        for name, number in self._numbers.items():
            # The others are constants, which some writers may leave out.
            is_learnt = name.startswith("alpha")
            yield WeightSlot(f"{prefix}.act_fn.{name}", number, is_optional=not is_learnt, is_drawn=is_learnt)


def new_mlp(blank: BlankWeights) -> GatedMlp | PlainMlp:
    """A layer's own, where that has no experts. blank: of the layer."""
    config = blank.config
    kind = GatedMlp if config.is_gated else XieluMlp if config.activation == "xielu" else PlainMlp
    return kind(blank.within(config.names.mlp.module), config.intermediate_size, config.names.mlp, config.mlp_bias)
