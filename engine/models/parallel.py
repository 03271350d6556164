"""The layer of Command R: attention and MLP side by side, on one norm."""

from torch import Tensor

from .llama import LlamaLayer


class ParallelLayer(LlamaLayer):
    """See `DecoderLayer`."""

    def feed_forward(self, branch: Tensor, residual: Tensor) -> Tensor:
        # What attention read, not what it made of it; cheaper computed again than kept.
        normed = self.mlp_norm(residual)
        residual.add_(branch)
        return self._scaled(self.mlp(normed))
