"""What of a model the GPU's attention kernel is compiled for, and how that cuts its work."""

from dataclasses import dataclass

import torch

from ..device import num_processors, shared_bytes
from .kernel_shapes import KernelShapes, choose_kernels
from .plan import Tiling

# The sizes of heads that the GPU's kernel takes.
HEAD_DIMS = range(16, 257)


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

    def kernels(self, device: torch.device, reads_fp8: bool = False) -> KernelShapes:
        """What is launched there, over a cache in FP8 or in the model's dtype.

        Raises `UnsupportedGpuError` where its shared memory is not enough for any.
        """
        return self.tuned or choose_kernels(self.group, self.head_dim, self.dtype, shared_bytes(device), reads_fp8)

    def tiling(self, device: torch.device) -> Tiling:
        processors, kernels = num_processors(device), self.kernels(device)
        narrow, wide = kernels.narrow, kernels.wide
        return Tiling(
            narrow_queries=narrow.rows // self.group,
            wide_queries=wide.rows // self.group,
            tile=max(narrow.tile, wide.tile),
            num_kv_heads=self.num_kv_heads,
            narrow_programs=processors * narrow.programs_per_processor,
            wide_programs=processors * wide.programs_per_processor,
        )


# What a plan depends on beside the step: the shape, and the sliding window.
PlanKey = tuple[AttentionShape, int | None]
