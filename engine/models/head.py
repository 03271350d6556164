"""What a decoder has after its layers: the final norm, and a matrix that gives each token of the vocabulary a logit."""

from collections.abc import Iterator

from torch import Tensor

from ...kernels.linear import Linear
from ..checkpoints.weights import WeightSlot
from .blocks import BlankWeights, linear_slots
from .norms import LayerNorm, RmsNorm


class Head:
    """`embedding`: the model's, where it is the matrix as well."""

    def __init__(self, blank: BlankWeights, embedding: Tensor | None) -> None:
        config = blank.config
        self._norm_name, self._name = config.names.final_norm, config.names.head
        self._is_tied = embedding is not None
        self.norm = LayerNorm(blank) if config.falcon else RmsNorm(blank)
        if embedding is not None:
            self.matrix = Linear(embedding)
        else:
            self.matrix = blank.linear([self._name], [config.vocab_size], config.hidden_size)

    def projections(self) -> Iterator[Linear]:
        """The matrix, where it is not the embedding."""
        if not self._is_tied:
            yield self.matrix

    def weight_slots(self) -> Iterator[WeightSlot]:
        yield from self.norm.weight_slots(self._norm_name)
        for matrix in self.projections():
            yield from linear_slots(matrix, [self._name])
