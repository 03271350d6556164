"""The memory for recurrent states: what layers without keys and values know of a sequence."""

import torch

from ...kernels.recurrent_states import StateSlots
from ..checkpoints.model_config import ModelConfig
from ..models.layer_states import LayerStates
from .kv_memory import zeros
from .state_pool import NULL_STATE


class StateMemory:
    """States 1 to `num_states` of all layers that have some, and state 0, which stays zero.

    conv: [num_state_layers, 1 + num_states, conv_width - 1, mixed_size], the model's dtype; recurrent:
    [num_state_layers, 1 + num_states, num_heads, key_dim, value_dim] float32.
    """

    def __init__(self, model: ModelConfig, num_states: int, dtype: torch.dtype, device: torch.device) -> None:
        layers = model.state_layers
        assert layers is not None
        self.num_states = num_states
        shape = (sum(layers.layers), NULL_STATE + 1 + num_states)
        self.conv = zeros((*shape, layers.conv_width - 1, layers.mixed_size), dtype, device)
        self.recurrent = zeros((*shape, *layers.recurrent), torch.float32, device)

    def of(self, slots: StateSlots) -> LayerStates:
        """As the layers take them for a batch whose sequences have theirs there."""
        return LayerStates(self.conv, self.recurrent, slots)
