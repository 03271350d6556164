"""Whole KV blocks copied: to other blocks, or out to memory of the host and back."""

import torch
from torch import Tensor

from ..device import runs_triton


def copy_blocks(kv_cache: Tensor, sources: Tensor, destinations: Tensor) -> None:
    """Copy block `sources[i]` to block `destinations[i]` in all layers; changes the cache in place.

    kv_cache: [rows, num_layers, num_blocks, block_size, num_kv_heads, head_dim]. sources, destinations: [n] int64; no
    block is written twice, or both read and written.
    """
    if runs_triton(kv_cache):
        from .triton import copy_blocks_triton

        copy_blocks_triton(kv_cache, sources, destinations)
    else:
        copy_blocks_reference(kv_cache, sources, destinations)


def copy_blocks_reference(kv_cache: Tensor, sources: Tensor, destinations: Tensor) -> None:
    """See `copy_blocks`."""
    held = _words(kv_cache)
    held[:, :, destinations] = held[:, :, sources]


def swap_out(kv_cache: Tensor, blocks: Tensor) -> Tensor:
    """Blocks' contents in memory of the host: [rows, num_layers, n, block_size, num_kv_heads, head_dim].

    From a GPU they come into pinned memory, and arrive when the stream has come so far.
    """
    gathered = _words(kv_cache).index_select(2, blocks).view(kv_cache.dtype)
    if not kv_cache.is_cuda:
        return gathered
    held = torch.empty(gathered.shape, dtype=gathered.dtype, pin_memory=True)
    return held.copy_(gathered, non_blocking=True)


def swap_in(kv_cache: Tensor, blocks: Tensor, held: Tensor, first: int = 0) -> None:
    """Put what `swap_out` gave, from its `first` block on, into these blocks; changes the cache in place."""
    if held.shape[2] - first != len(blocks) or held.dtype != kv_cache.dtype:
        raise ValueError(
            f"held {tuple(held.shape)} is {held.dtype}; must have {len(blocks)} blocks of {kv_cache.dtype} from its "
            f"block {first} on"
        )
    # Moved as a whole: to cut it the host would read what the device may still be writing.
    moved = held.to(kv_cache.device, non_blocking=True)[:, :, first:]
    _words(kv_cache).index_copy_(2, blocks, _words(moved))


def _words(blocks: Tensor) -> Tensor:
    """The same memory as integers, as torch indexes no float8; as few as may be, since each is moved by itself."""
    num_bytes = blocks.shape[-1] * blocks.element_size()
    return blocks.view(torch.int64 if num_bytes % 8 == 0 else torch.uint8)
