"""What of a model the GPU's attention kernel is compiled for, and how that cuts its work."""

from dataclasses import dataclass

import torch

from ..device import num_processors, shared_bytes
from .kernel_shapes import KernelShapes, choose_kernels, choose_latent_kernels, most_latent_rows
from .plan import Tiling

# The sizes of heads that the GPU's kernel takes, and of latents that are values, and the first part of keys.
HEAD_DIMS = LATENT_DIMS = range(16, 513)
# What keys have behind that.
KEY_RESTS = range(1, 65)


@dataclass(frozen=True)
class AttentionShape:
    """What of a model and its cache the kernels are compiled for.

    head_dim: of values. key_rest: by how much keys are longer, of which values are then the first part; 0: not at all.
    tuned: the kernel's shapes, where they are not to be the ones chosen here (`benchmarks/gpu_tuning.py`).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    tuned: KernelShapes | None = None
    key_rest: int = 0

    @classmethod
    def of(
        cls, num_heads: int, num_kv_heads: int, key_dim: int, value_dim: int, dtype: torch.dtype, device: torch.device
    ) -> "AttentionShape":
        """For keys and values of these sizes, of which values may be the shorter ones (`of_latents`).

        Raises `ValueError` where the kernels take no such sizes.
        """
        if key_dim == value_dim:
            if key_dim not in HEAD_DIMS:
                raise ValueError(
                    f"heads of {key_dim}, and the GPU's kernels take {HEAD_DIMS.start} to {HEAD_DIMS.stop - 1}"
                )
            return cls(num_heads, num_kv_heads, key_dim, dtype)
        if value_dim not in LATENT_DIMS or key_dim - value_dim not in KEY_RESTS:
            raise ValueError(
                f"latents of {value_dim} and keys of {key_dim}, and the GPU's kernels take latents of "
                f"{LATENT_DIMS.start} to {LATENT_DIMS.stop - 1}, and keys longer by at most {KEY_RESTS.stop - 1}"
            )
        return cls.of_latents(num_heads, value_dim, key_dim - value_dim, dtype, device)

    @classmethod
    def of_latents(
        cls, num_heads: int, head_dim: int, key_rest: int, dtype: torch.dtype, device: torch.device
    ) -> "AttentionShape":
        """Where all heads see one key. More of them than a program has rows for there are as if they had several."""
        most = most_latent_rows(dtype, shared_bytes(device))
        num_parts = next(parts for parts in range(-(-num_heads // most), num_heads + 1) if num_heads % parts == 0)
        return cls(num_heads, num_parts, head_dim, dtype, key_rest=key_rest)

    @property
    def group(self) -> int:
        """Query heads of one KV head, whose queries share a tile."""
        return self.num_heads // self.num_kv_heads

    def kernels(self, device: torch.device, reads_fp8: bool = False) -> KernelShapes:
        """What is launched there, over a cache in FP8 or in the model's dtype.

        Raises `UnsupportedGpuError` where its shared memory is not enough for any.
        """
        if self.tuned is not None:
            return self.tuned
        shared = shared_bytes(device)
        if self.key_rest:
            return choose_latent_kernels(self.group, self.head_dim, self.key_rest, self.dtype, shared)
        return choose_kernels(self.group, self.head_dim, self.dtype, shared, reads_fp8)

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
