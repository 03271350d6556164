"""What the decoder needs of a layer, and what all families' layers have in common."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

from torch import Tensor

from ...kernels.linear import Linear
from ..checkpoints.weights import WeightSlot
from .attention import Attention
from .blocks import BlankWeights, Step
from .latent_attention import LatentAttention
from .mlp import GatedMlp, PlainMlp
from .moe import Mixture
from .state_mixer import StateMixer


class DecoderLayer(ABC):
    """One family's layer. A stream of residuals runs past it; what it computes joins the stream in the next one."""

    attention: Attention | LatentAttention | StateMixer
    mlp: GatedMlp | PlainMlp | Mixture

    @abstractmethod
    def __init__(self, blank: BlankWeights, index: int, rope: int) -> None:
        """The layer of this index; `rope` is the index of its rope among the model's."""

    @property
    def mixture(self) -> Mixture | None:
        """Its MLP where that is a mixture of experts."""
        return self.mlp if isinstance(self.mlp, Mixture) else None

    @abstractmethod
    def attend(self, branch: Tensor, residual: Tensor, key_cache: Tensor, value_cache: Tensor, step: Step) -> Tensor:
        """Add `branch` to `residual`, in place; return attention's output, of the tokens that `step` wants.

        branch, residual: [num_tokens, hidden_size]. Writes the tokens' keys and values into the caches.
        """

    @abstractmethod
    def feed_forward(self, branch: Tensor, residual: Tensor, step: Step) -> Tensor:
        """Add `branch`, attention's output, to `residual`, in place; return the MLP's. Both: [n, hidden_size].

        `step`: of these n tokens.
        """

    def projections(self) -> Iterator[Linear]:
        """Every matrix that it multiplies by: nearly all of its weights, and of its work."""
        yield from self.attention.projections()
        yield from self.mlp.projections()

    @abstractmethod
    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Every weight under the name that a checkpoint gives it."""


# The layer of this index; the last number is that of its rope among the model's.
NewLayer = Callable[[BlankWeights, int, int], DecoderLayer]
