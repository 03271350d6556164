"""A linear layer's low-rank matrices of several adapters, in slots of memory that stays."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Outputs that one program computes.
OUTPUTS = 64
# Numbers that are read at once where they begin and end at multiples of so many.
_ALIGNED = 8


@dataclass(frozen=True)
class AdapterMatrices:
    """down: [num_slots, num_parts, max_rank, in]; up: [num_slots, max_rank, out], the parts' side by side as the
    layer's outputs are. ranks: [num_slots, num_parts] int32, 0 where an adapter adds nothing to a part. column_tiles:
    [n, 3] int32, outputs that are computed together: their part, the first of them, and where the part ends.
    are_aligned: whether every part begins and ends at a multiple of eight outputs.
    """

    down: Tensor
    up: Tensor
    ranks: Tensor
    column_tiles: Tensor
    are_aligned: bool

    @classmethod
    def blank(
        cls,
        num_slots: int,
        max_rank: int,
        num_inputs: int,
        num_outputs: int,
        parts: Sequence[tuple[int, int]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> "AdapterMatrices":
        """All slots empty. parts: each one's first output and how many it has."""
        tiles = [
            (part, begin, start + size)
            for part, (start, size) in enumerate(parts)
            for begin in range(start, start + size, OUTPUTS)
        ]
        return cls(
            torch.zeros(num_slots, len(parts), max_rank, num_inputs, dtype=dtype, device=device),
            torch.zeros(num_slots, max_rank, num_outputs, dtype=dtype, device=device),
            torch.zeros(num_slots, len(parts), dtype=torch.int32, device=device),
            torch.tensor(tiles, dtype=torch.int32).to(device),
            all(start % _ALIGNED == 0 and size % _ALIGNED == 0 for start, size in parts),
        )

    def clear(self, slot: int) -> None:
        self.ranks[slot] = 0

    def put(self, slot: int, part: int, start: int, down: Tensor, up: Tensor) -> None:
        """Copy an adapter's matrices into its slot. down: [rank, in]; up: [rank, size], for outputs from `start` on."""
        rank, size = up.shape
        self.down[slot, part, :rank] = down.to(self.down.device)
        self.up[slot, :rank, start : start + size] = up.to(self.up.device)
        self.ranks[slot, part] = rank
