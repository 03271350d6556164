"""The layer of Gemma 4: Gemma 3's, with norms for values, and a number that all of it is multiplied by at its end."""

from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor

from ...kernels.norm_rotary import rms_norm
from ..checkpoints.weights import WeightSlot
from .attention import Attention
from .blocks import BlankWeights
from .gemma import GemmaLayer


class Gemma4Layer(GemmaLayer):
    """See `DecoderLayer`."""

    def __init__(self, blank: BlankWeights, index: int, rope: int) -> None:
        super().__init__(blank, index, rope)
        self._scalar = torch.empty(1, dtype=blank.dtype, device=blank.device)

    def _new_attention(self, blank: BlankWeights, rope: int, sliding_window: int | None) -> Attention:
        return Gemma4Attention(blank, rope, sliding_window)

    def feed_forward(self, branch: Tensor, residual: Tensor) -> Tensor:
        made = super().feed_forward(branch, residual)
        residual.mul_(self._scalar)
        return made.mul_(self._scalar)

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield from super().weight_slots(prefix)
        yield WeightSlot(f"{prefix}.layer_scalar", self._scalar)


class Gemma4Attention(Attention):
    """With a norm for each value head, which has no weights."""

    @cached_property
    def _ones(self) -> Tensor:
        assert self.key_norm is not None
        return torch.ones_like(self.key_norm)

    def project(self, x: Tensor) -> Tensor:
        """See `Attention`. The last columns are what values are made of, or keys, of which values are made as well."""
        projected = self.qkv(x)
        made = projected[:, -self._sizes[2] :]
        heads = made.reshape(-1, self._config.head_dim)
        values = rms_norm(heads, self._ones, self._config.rms_norm_eps).view(len(x), -1)
        if self._config.keys_are_values:
            return torch.cat((projected, values), dim=1)
        made.copy_(values)
        return projected
