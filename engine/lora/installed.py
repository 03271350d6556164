"""The adapters that a model multiplies with: those of any token of any step, in this process."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from ...kernels.device import runs_triton
from ..config import EngineConfig
from ..models.blocks import LinearPart
from .adapter import Adapter
from .columns import AdapterColumns
from .slots import AdapterSlots, Ints


class InstalledAdapters:
    """On a GPU each has a slot (`slots`), elsewhere some columns.

    In steps whose tokens want none, the model is as it is without. parts: the projections that can be adapted.
    """

    def __init__(
        self, parts: Mapping[str, LinearPart], config: EngineConfig, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._columns = AdapterColumns(parts, dtype, device)
        self.slots: AdapterSlots | None = None
        if runs_triton(torch.empty(0, device=device)) and parts:
            self.slots = AdapterSlots(parts, config.max_loras, config.max_lora_rank, dtype, device)

    def install(self, held: Sequence[Adapter]) -> None:
        """Have these, and those alone, ready. Raises `OutOfMemoryError`: then none may be."""
        (self.slots or self._columns).install(held)

    def applied(self, numbers: Ints, wanted: Tensor | None) -> AbstractContextManager[None]:
        """Add to a step's products. numbers: see `Batch.adapters`.

        wanted: [n] int64, the tokens that are left in the last layer, if not all are; on a GPU they are.
        """
        if self.slots is None:
            return self._columns.applied(numbers, wanted)
        assert wanted is None, "every layer computes all tokens on a GPU"
        return self.slots.applied(self.slots.tiles_of(numbers))
