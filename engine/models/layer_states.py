"""What layers without keys and values have in their place."""

from typing import NamedTuple

from torch import Tensor

from ...kernels.recurrent_states import StateSlots


class LayerStates(NamedTuple):
    """The states of those layers that have no keys and values, and where a batch's sequences have theirs.

    conv: [num_state_layers, 1 + num_states, conv_width - 1, mixed_size]; recurrent: [num_state_layers, 1 + num_states,
    num_heads, key_dim, value_dim] float32.
    """

    conv: Tensor
    recurrent: Tensor
    slots: StateSlots
