"""What layers without keys and values have in their place, or beside them."""

from typing import NamedTuple

from torch import Tensor

from ...kernels.recurrent_states import StateSlots


class LayerStates(NamedTuple):
    """The states of those layers that have some, and where a batch's sequences have theirs.

    conv: [num_state_layers, 1 + num_states, conv_width - 1, mixed_size]; recurrent: [num_state_layers, 1 + num_states,
    num_heads, key_dim, value_dim] float32.
    """

    conv: Tensor
    recurrent: Tensor
    slots: StateSlots

    def of_layers(self) -> list[tuple[Tensor, Tensor]]:
        """Each layer's own: its `conv` and its `recurrent`."""
        return list(zip(self.conv.unbind(), self.recurrent.unbind(), strict=True))
