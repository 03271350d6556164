"""What a decoder has after its layers: the final norm, and a matrix that gives each token of the vocabulary a logit."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from ...kernels.linear import Linear
from ..checkpoints.gguf.file import is_gguf
from ..checkpoints.weights import WeightSlot
from ..quantization.stored import StoredModules, stored_modules
from .blocks import BlankWeights, linear_slots
from .norms import new_norm


class Head:
    """`embedding`: the model's, where it is the matrix as well; of GGUF it may be multiplied by as it is on disk."""

    def __init__(self, blank: BlankWeights, embedding: Tensor | None) -> None:
        config = blank.config
        self._norm_name, self._name = config.names.final_norm, config.names.head
        self._is_tied = embedding is not None
        self.norm = new_norm(blank)
        if embedding is not None:
            self.matrix = Linear(_tied(blank) or embedding)
        else:
            self.matrix = blank.linear([self._name], [config.vocab_size], config.hidden_size)

    def projections(self) -> Iterator[Linear]:
        """The matrix, where it is not the embedding."""
        if not self._is_tied:
            yield self.matrix

    def weight_slots(self) -> Iterator[WeightSlot]:
        yield from self.norm.weight_slots(self._norm_name)
        if not self._is_tied or isinstance(self.matrix.held, StoredModules):
            yield from linear_slots(self.matrix, [self._name])


def _tied(blank: BlankWeights) -> StoredModules[Any] | None:
    """The embedding's own tensor once more, where kernels take it as it is."""
    config, names = blank.config, [blank.config.names.embedding]
    scheme = config.quantization.scheme(names) if config.quantization and is_gguf(config.path) else None
    if scheme is None:
        return None
    return stored_modules(scheme, names, [config.vocab_size], config.hidden_size, blank.dtype, blank.device)
