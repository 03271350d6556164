"""What a token is to each layer by itself, beside the residual stream (per-layer embeddings, as in Gemma 3n and 4)."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import embedding

from ...kernels.activation import gelu_tanh
from ...kernels.linear import Linear
from ...kernels.norm_rotary import rms_norm
from ..checkpoints.model_shape import LayerInputsConfig
from ..checkpoints.weights import WeightSlot
from .blocks import BlankWeights, linear_slots


class LayerInputs:
    """An embedding for each layer, and as much as a matrix makes of the model's own."""

    def __init__(self, blank: BlankWeights, inputs: LayerInputsConfig) -> None:
        config = blank.config
        self._config, self._size = config, inputs.size
        self._prefix = config.names.layers.removesuffix("layers")
        total = config.num_hidden_layers * inputs.size
        self._embedding = blank.matrix(inputs.vocab_size, total)
        # Rounded as the weights are.
        self._scale = torch.tensor(inputs.size**0.5, dtype=blank.dtype).item()
        self.projection = replace(blank, prefix=self._prefix).linear(
            ["per_layer_model_projection"], [total], config.hidden_size
        )
        self._norm = blank.norm(inputs.size)

    def __call__(self, token_ids: Tensor, embedded: Tensor) -> Tensor:
        """[num_tokens, num_layers, size]. embedded: [num_tokens, hidden_size], as the first layer has the tokens."""
        projected = self.projection(embedded).mul_(self._config.hidden_size**-0.5)
        made = rms_norm(projected.view(-1, self._size), self._norm, self._config.rms_norm_eps)
        own = embedding(token_ids, self._embedding).view(made.shape).mul_(self._scale)
        return own.add_(made).mul_(2**-0.5).view(len(token_ids), -1, self._size)

    def weight_slots(self) -> Iterator[WeightSlot]:
        yield WeightSlot(f"{self._prefix}embed_tokens_per_layer.weight", self._embedding)
        yield from linear_slots(self.projection, [f"{self._prefix}per_layer_model_projection"])
        yield WeightSlot(f"{self._prefix}per_layer_projection_norm.weight", self._norm)


class LayerInputMlp:
    """projection(activation(gate(x)) * input): how a layer takes what is its own. blank: of the layer."""

    def __init__(self, blank: BlankWeights, size: int) -> None:
        hidden_size = blank.config.hidden_size
        self.gate = blank.linear(["per_layer_input_gate"], [size], hidden_size)
        self.projection = blank.linear(["per_layer_projection"], [hidden_size], size)

    def __call__(self, x: Tensor, layer_input: Tensor) -> Tensor:
        """x: [num_tokens, hidden_size], layer_input: [num_tokens, size]. Returns what x is like."""
        return self.projection(gelu_tanh(self.gate(x)).mul_(layer_input))

    def projections(self) -> Iterator[Linear]:
        yield self.gate
        yield self.projection

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield from linear_slots(self.gate, [f"{prefix}.per_layer_input_gate"])
        yield from linear_slots(self.projection, [f"{prefix}.per_layer_projection"])
