"""What of a model the GPU's attention kernel is compiled for, and in which shapes."""

from dataclasses import dataclass

import torch

from ..device import num_processors
from .plan import Tiling


@dataclass(frozen=True)
class KernelShape:
    """One of the attention kernel's two shapes: rows of a Q-block, keys at a time, and how it is compiled.

    A tile's keys are found by way of the block table, and each of the two loads takes stages of the pipeline: it needs
    five before a second tile is on its way while one is computed (seen in the shared memory of what was compiled).
    """

    rows: int
    tile: int
    num_warps: int
    num_stages: int
    programs_per_processor: int

    @property
    def max_registers(self) -> int:
        """What a thread may take of a processor's registers where so many programs run at once."""
        return min(65536 // (32 * self.num_warps * self.programs_per_processor) // 8 * 8, 255)


@dataclass(frozen=True)
class AttentionShape:
    """What of a model and its cache the kernels are compiled for."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def group(self) -> int:
        """Query heads of one KV head, whose queries share a tile."""
        return self.num_heads // self.num_kv_heads

    @property
    def narrow(self) -> KernelShape:
        """For one or a few queries, where reading keys is all the work."""
        rows = max(16, _power_of_two(self.group))
        if self._is_large:
            # Three would not fit a processor's registers: the third waited for the others' end.
            return KernelShape(rows, 32, num_warps=4, num_stages=5, programs_per_processor=2)
        return KernelShape(rows, 64, num_warps=4, num_stages=5, programs_per_processor=3)

    @property
    def wide(self) -> KernelShape:
        """For prefill chunks and shared prefixes, where the products are."""
        if self._is_large:
            rows = max(32 if self.dtype == torch.float32 else 64, _power_of_two(self.group))
            return KernelShape(rows, 32, num_warps=4, num_stages=5, programs_per_processor=1)
        rows = max(128, _power_of_two(self.group))
        return KernelShape(rows, 64, num_warps=8, num_stages=5, programs_per_processor=1)

    @property
    def _is_large(self) -> bool:
        """Whether tiles of this are to have fewer rows: long heads, and float32, which has no tensor cores."""
        return self.head_dim > 128 or self.dtype == torch.float32

    def tiling(self, device: torch.device) -> Tiling:
        processors = num_processors(device)
        return Tiling(
            narrow_queries=self.narrow.rows // self.group,
            wide_queries=self.wide.rows // self.group,
            tile=max(self.narrow.tile, self.wide.tile),
            num_kv_heads=self.num_kv_heads,
            narrow_programs=processors * self.narrow.programs_per_processor,
            wide_programs=processors * self.wide.programs_per_processor,
        )


# What a plan depends on beside the step: the shape, and the sliding window.
PlanKey = tuple[AttentionShape, int | None]


def _power_of_two(least: int) -> int:
    """The first that is not below `least`."""
    return 1 << (least - 1).bit_length()
