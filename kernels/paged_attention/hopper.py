"""When the GPU's attention for many queries is the kernel that is written for Hopper, and how that is launched."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..device import is_hopper, num_processors
from ..kv_cache.fp8 import is_fp8
from ..launch_sizes import next_power_of_2
from .attention_shape import AttentionShape
from .kernel_shapes import WIDE_ROWS, KernelShape

# The first whose Gluon the kernel was run with.
_FIRST_TRITON = (3, 6)
# What copies of 16 bytes want strides and the size of heads to be a multiple of, and addresses.
_MULTIPLE = 16
# By the size of heads: keys of a tile, and for how many tiles of keys, and of values, there is room in shared memory.
# 64 is the fewest numbers that the tensor cores' rows have there.
_TILES = {64: (128, 4), 128: (128, 2), 256: (64, 2)}
# Those who widen have no registers for larger ones.
_MOST_DIM, _MOST_FP8_DIM = 256, 128
_MULTIPLYING_WARPS = 4


def takes_hopper_kernel(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, shape: AttentionShape, kernel: KernelShape
) -> bool:
    """Whether wide items, cut for `kernel`, are that kernel's here."""
    return (
        kernel.rows == WIDE_ROWS
        and shape.head_dim <= (_MOST_FP8_DIM if is_fp8(key_cache) else _MOST_DIM)
        and shape.head_dim % _MULTIPLE == 0
        and not shape.key_rest
        and shape.dtype != torch.float32
        and hopper_kernel(query.device) is not None
        and _is_aligned(key_cache)
        and _is_aligned(value_cache)
    )


def launch_hopper_kernel(given: dict[str, Any], device: torch.device) -> None:
    """`given`: what `attend_kernel` takes too."""
    padded_dim = max(min(_TILES), next_power_of_2(given["HEAD_DIM"]))
    tile, stages = _TILES[padded_dim]
    attend_hopper_kernel: Any = hopper_kernel(device)
    attend_hopper_kernel[(num_processors(device),)](
        **given | {"PADDED_DIM": padded_dim}, TILE=tile, STAGES=stages, num_warps=_MULTIPLYING_WARPS
    )


@cache
def hopper_kernel(device: torch.device) -> Any:
    """None where the GPU is another, or Triton is older."""
    if not is_hopper(device):
        return None
    import triton

    if tuple(int(part) for part in triton.__version__.split(".")[:2]) < _FIRST_TRITON:
        return None
    from .triton_hopper_kernel import attend_hopper_kernel

    return attend_hopper_kernel


def _is_aligned(cache: Tensor) -> bool:
    return not any(number % _MULTIPLE for number in (cache.data_ptr(), *cache.stride()[:3]))
