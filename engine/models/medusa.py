"""Medusa heads: what a model's last hidden state says of the tokens after the next one (arXiv:2401.10774)."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import silu

from ...kernels.sampling import likeliest_tokens
from ..checkpoints.medusa_config import MedusaConfig
from ..checkpoints.model_config import ModelConfig
from ..checkpoints.weights import WeightSlot, draw_weights, load_weights
from .blocks import BlankWeights, linear_slots


class MedusaHeads:
    """The first one guesses the token after the next, the second the one after that, and so on.

    Each is some residual blocks, x + SiLU(linear(x)), and a matrix to the model's vocabulary.
    """

    def __init__(self, config: MedusaConfig, model: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self.device = device
        self._blocks = []
        self._outputs = []
        size, blank = model.hidden_size, BlankWeights(model, dtype, device)
        for head in range(config.num_heads):
            names = [f"{head}.{block}.linear" for block in range(config.num_layers)]
            self._blocks.append([blank.linear([name], [size], size, bias=True, quantizable=False) for name in names])
            name = f"{head}.{config.num_layers}"
            self._outputs.append(blank.linear([name], [model.vocab_size], size, quantizable=False))

    def load(self) -> None:
        """Fill the weights from the folder. Raises `ModelError` naming the tensor that does not fit."""
        load_weights(self.config.path, self.weight_slots())

    def draw(self, seed: int) -> None:
        """Fill the weights at random."""
        draw_weights(self.weight_slots(), seed, self.device)

    def prepack(self) -> None:
        """Bring the filled weights into the layout that is fastest here."""
        for linear in (*self._outputs, *(block for blocks in self._blocks for block in blocks)):
            linear.prepack()

    def weight_slots(self) -> Iterator[WeightSlot]:
        """Every weight under the name that published heads give it."""
        for head, (blocks, output) in enumerate(zip(self._blocks, self._outputs, strict=True)):
            for index, block in enumerate(blocks):
                yield from linear_slots(block, [f"{head}.{index}.linear"])
            yield from linear_slots(output, [f"{head}.{len(blocks)}"])

    @torch.inference_mode()
    def guess(self, hidden: Tensor, number: int) -> Tensor:
        """The likeliest tokens of the first so many heads: [n, number] int64.

        hidden: [n, hidden_size], after the model's final norm.
        """
        guesses = []
        for blocks, output in zip(self._blocks[:number], self._outputs, strict=False):
            x = hidden
            for block in blocks:
                x = x + silu(block(x))
            guesses.append(likeliest_tokens(output(x)).tokens)
        return torch.stack(guesses, dim=1)
