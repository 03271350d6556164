"""The layer of Nemotron-H and Nemotron 3: a norm, and one thing behind it."""

from collections.abc import Iterator

from torch import Tensor

from ...kernels.linear import Linear
from ..checkpoints.weights import WeightSlot
from .attention import Attention
from .blocks import BlankWeights, Step
from .layer import DecoderLayer
from .moe import Mixture, new_feed_forward
from .norms import new_norm
from .state_mixer import StateMixer
from .state_mixers import new_state_mixer


class NemotronHLayer(DecoderLayer):
    """See `DecoderLayer`. It attends, has a state, or feeds forward: what it has not, it leaves out."""

    def __init__(self, blank: BlankWeights, index: int, rope: int) -> None:
        config = blank.config
        self._norm_name, self._part_name = config.names.layer_norms[0], config.names.attention
        self._norm = new_norm(blank)
        self._mixer = _new_mixer(blank, index, rope) if config.has_mixer(index) else None
        self._mlp = new_feed_forward(blank, index) if config.has_mlp(index) else None

    @property
    def mixture(self) -> Mixture | None:
        return self._mlp if isinstance(self._mlp, Mixture) else None

    def attend(self, branch: Tensor, residual: Tensor, key_cache: Tensor, value_cache: Tensor, step: Step) -> Tensor:
        if self._mixer is None:
            return branch
        return self._mixer(self._norm.of_sum(branch, residual), key_cache, value_cache, step)

    def feed_forward(self, branch: Tensor, residual: Tensor, step: Step) -> Tensor:
        return branch if self._mlp is None else self._mlp(self._norm.of_sum(branch, residual))

    def projections(self) -> Iterator[Linear]:
        for part in (self._mixer, self._mlp):
            yield from () if part is None else part.projections()

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield from self._norm.weight_slots(f"{prefix}.{self._norm_name}")
        for part in (self._mixer, self._mlp):
            yield from () if part is None else part.weight_slots(f"{prefix}.{self._part_name}")


def _new_mixer(blank: BlankWeights, index: int, rope: int) -> Attention | StateMixer:
    """blank: of the layer."""
    config = blank.config
    within = blank.within(config.names.attention)
    if config.state_layers is not None and config.has_state(index):
        return new_state_mixer(within, config.state_layers)
    return Attention(within, rope, config.sliding_windows[index])
