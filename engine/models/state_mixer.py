"""What a layer has in attention's place that keeps a state of its sequences."""

from abc import ABC, abstractmethod
from collections.abc import Iterator

from torch import Tensor

from ...kernels.linear import Linear, RowFormat
from ..checkpoints.weights import WeightSlot
from .blocks import Step


class StateMixer(ABC):
    """Called as `Attention` is, with a layer's states in the place of its keys and values.

    Where ranks share it, it gives their sum.
    """

    # The input is taken in the model's dtype alone.
    row_format: RowFormat | None = None

    @abstractmethod
    def __call__(self, x: Tensor, conv_states: Tensor, states: Tensor, step: Step) -> Tensor:
        """x: [num_tokens, hidden_size]. Changes both kinds of states; returns the rows that `step` wants."""

    @abstractmethod
    def projections(self) -> Iterator[Linear]: ...

    @abstractmethod
    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]: ...
