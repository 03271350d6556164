"""The layer of Falcon-H1: attention and a state side by side on one input, then an MLP, and each of them scaled."""

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from ...kernels.linear import Linear
from ..checkpoints.weights import WeightSlot
from ..sharding.ranks import ALONE
from .attention import Attention
from .blocks import BlankWeights, Step
from .layer import DecoderLayer
from .mlp import GatedMlp, PlainMlp, new_mlp
from .norms import RmsNorm
from .state_mixers import new_state_mixer


class FalconH1Layer(DecoderLayer):
    """See `DecoderLayer`."""

    mlp: GatedMlp | PlainMlp

    def __init__(self, blank: BlankWeights, index: int, rope: int) -> None:
        config = blank.config
        assert config.falcon_h1 is not None, "not read as a Falcon-H1"
        assert config.state_layers is not None
        self._scales, self._index = config.falcon_h1, index
        self._ranks, self._names, self._state_name = blank.ranks, config.names, config.state_layers.module
        self.input_norm, self.mlp_norm = RmsNorm(blank), RmsNorm(blank)
        # Ranks add up what both give together.
        own = replace(blank, ranks=ALONE)
        self.attention = Attention(own.within(self._names.attention), rope, None)
        self.state_mixer = new_state_mixer(own.within(self._state_name), config.state_layers)
        self.mlp = new_mlp(blank)

    def attend(self, branch: Tensor, residual: Tensor, key_cache: Tensor, value_cache: Tensor, step: Step) -> Tensor:
        normed = self.input_norm.of_sum(branch, residual)
        read = self.state_mixer(normed, *step.states_beside[self._index], step)
        attended = self.attention(normed, key_cache, value_cache, step).mul_(self._scales.attention_out_scale)
        return self._ranks.sum(attended.add_(read, alpha=self._scales.state_out_scale))

    def feed_forward(self, branch: Tensor, residual: Tensor, step: Step) -> Tensor:
        normed = self.mlp_norm.of_sum_in(self.mlp.row_format, branch, residual)
        return self.mlp(normed).mul_(self._scales.mlp_out_scale)

    def projections(self) -> Iterator[Linear]:
        yield from self.state_mixer.projections()
        yield from super().projections()

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        before_both, before_mlp = self._names.layer_norms
        yield from self.input_norm.weight_slots(f"{prefix}.{before_both}")
        yield from self.attention.weight_slots(f"{prefix}.{self._names.attention}")
        yield from self.state_mixer.weight_slots(f"{prefix}.{self._state_name}")
        yield from self.mlp_norm.weight_slots(f"{prefix}.{before_mlp}")
        yield from self.mlp.weight_slots(f"{prefix}.{self._names.mlp.module}")
