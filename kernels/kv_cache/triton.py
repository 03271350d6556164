"""Copies between KV blocks on the GPU: checks, and launches."""

import torch
from torch import Tensor

from ..launch_sizes import cdiv
from ..triton_checks import FLOAT_DTYPES, check_launch, check_tensor
from .fp8 import FP8_LARGEST
from .triton_kernels import copy_blocks_kernel

_ELEMENTS_PER_PROGRAM = 2048
_BYTES_OF_INT = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def copy_blocks_triton(kv_cache: Tensor, sources: Tensor, destinations: Tensor) -> None:
    """See `copy_blocks`."""
    check_launch("kv_cache", kv_cache, copy_blocks_kernel)
    check_tensor("kv_cache", kv_cache, [None] * 6, (*FLOAT_DTYPES, *FP8_LARGEST), kv_cache.device)
    sources, destinations = sources.contiguous(), destinations.contiguous()
    check_tensor("sources", sources, (None,), (torch.int64,), kv_cache.device)
    check_tensor("destinations", destinations, sources.shape, (torch.int64,), kv_cache.device)
    if not len(sources):
        return
    num_blocks, block_numel = kv_cache.shape[2], kv_cache[0, 0, 0].numel()
    grid = (len(sources), kv_cache.shape[0] * kv_cache.shape[1], cdiv(block_numel, _ELEMENTS_PER_PROGRAM))
    # Bits are copied, whatever numbers they mean.
    bits = kv_cache.view(_BYTES_OF_INT[kv_cache.dtype.itemsize])
    copy_blocks_kernel[grid](bits, sources, destinations, num_blocks, block_numel, ELEMENTS=_ELEMENTS_PER_PROGRAM)
