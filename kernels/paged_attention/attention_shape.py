"""What of a model the GPU's attention kernel is compiled for, and in which shapes."""

from dataclasses import dataclass
from functools import cached_property

import torch

from ..device import num_processors
from .plan import Tiling


@dataclass(frozen=True)
class KernelShape:
    """One of the attention kernel's two shapes: rows of a Q-block, keys at a time, and how it is compiled.

    A tile's keys are found by way of the block table, and each of the two loads takes stages of the pipeline: it needs
    five before a second tile is on its way while one is computed, and seven before a third (seen in the shared memory
    of what was compiled). max_registers: what a thread may take. overlaps: see `attend_kernel`.
    """

    rows: int
    tile: int
    num_warps: int
    num_stages: int
    programs_per_processor: int
    max_registers: int
    overlaps: bool


@dataclass(frozen=True)
class KernelShapes:
    """narrow: for one or a few queries, where reading keys is all the work. wide: for prefill chunks and shared
    prefixes, where the products are."""

    narrow: KernelShape
    wide: KernelShape


@dataclass(frozen=True)
class AttentionShape:
    """What of a model and its cache the kernels are compiled for.

    tuned: the kernel's shapes, where they are not to be the ones chosen here (`benchmarks/gpu_tuning.py`).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    tuned: KernelShapes | None = None

    @property
    def group(self) -> int:
        """Query heads of one KV head, whose queries share a tile."""
        return self.num_heads // self.num_kv_heads

    @property
    def narrow(self) -> KernelShape:
        return self._kernels.narrow

    @property
    def wide(self) -> KernelShape:
        return self._kernels.wide

    @cached_property
    def _kernels(self) -> KernelShapes:
        return self.tuned or KernelShapes(self._narrow, self._wide)

    @property
    def _narrow(self) -> KernelShape:
        rows = max(16, _power_of_two(self.group))
        if self.head_dim > 128 or self.dtype == torch.float32:
            return KernelShape(rows, 32, 4, 5, programs_per_processor=2, max_registers=255, overlaps=False)
        # What a wide program leaves of a processor's registers and memory is enough for one of these beside it.
        return KernelShape(rows, 32, 4, 7, programs_per_processor=4, max_registers=128, overlaps=False)

    @property
    def _wide(self) -> KernelShape:
        group = _power_of_two(self.group)
        if self.dtype == torch.float32:
            # Without tensor cores, nothing overlaps.
            return KernelShape(max(32, group), 32, 4, 5, programs_per_processor=1, max_registers=255, overlaps=False)
        rows = max(128, group)
        if self.head_dim > 128:
            return KernelShape(rows, 32, 8, 5, programs_per_processor=1, max_registers=255, overlaps=True)
        return KernelShape(rows, 64, 8, 5, programs_per_processor=1, max_registers=192, overlaps=True)

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
