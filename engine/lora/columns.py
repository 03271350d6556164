"""The adapters that a model holds on a CPU: their matrices side by side, with a column for each of their ranks."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ...kernels.linear import AdaptedRows, Addition
from ..models.blocks import LinearPart
from ..transfer import to_device
from .adapter import Adapter, LowRank, by_matrix
from .slots import Ints


class AdapterColumns:
    """Whichever adapters a step's tokens want, each projection has two products more; where they want none, none."""

    def __init__(self, parts: Mapping[str, LinearPart], dtype: torch.dtype, device: torch.device) -> None:
        self._parts = parts
        self._dtype, self._device = dtype, device
        self._rows = AdaptedRows()
        # Whose each of the columns is that the adapters' ranks make together.
        self._owners = torch.empty(0, dtype=torch.int64, device=device)

    def install(self, held: Sequence[Adapter]) -> None:
        """Put the matrices of all these in the place of those that were."""
        owners = [adapter.number for adapter in held for _ in range(adapter.rank)]
        self._owners = torch.tensor(owners, dtype=torch.int64, device=self._device)
        for linear, names in by_matrix(self._parts).items():
            wanted = [name for name in names if any(name in adapter.additions for adapter in held)]
            additions = [self._side_by_side(name, held) for name in wanted]
            if additions or linear.is_adapted:
                linear.adapt(self._rows, additions)

    @contextmanager
    def applied(self, numbers: Ints, wanted: Tensor | None) -> Iterator[None]:
        """Add to a step's products. See `InstalledAdapters.applied`."""
        foreign = to_device(numbers, self._device).unsqueeze(1) != self._owners
        with self._rows.without(foreign, None if wanted is None else foreign[wanted]):
            yield

    def _side_by_side(self, name: str, held: Sequence[Adapter]) -> Addition:
        part = self._parts[name]
        pairs = [adapter.additions.get(name) or self._nothing(part, adapter.rank) for adapter in held]
        down, up = torch.cat([each.down for each in pairs]), torch.cat([each.up for each in pairs])
        return Addition(part.start, down.to(self._device), up.to(self._device))

    def _nothing(self, part: LinearPart, rank: int) -> LowRank:
        shapes = ((rank, part.linear.num_inputs), (rank, part.size))
        return LowRank(*(torch.zeros(shape, dtype=self._dtype) for shape in shapes))
