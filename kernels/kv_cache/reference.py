"""The obvious torch; also the path that runs where no faster one exists."""

import torch
from torch import Tensor

from .fp8 import UNSCALED, KVScales, as_stored, is_fp8

# The slot of a token that pads a batch: nothing of it is kept.
PADDING_SLOT = -1


def write_kv_reference(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    kv_scales: KVScales = UNSCALED,
) -> None:
    """See `write_kv`."""
    store_rows(key, key_cache, slots, kv_scales.key)
    store_rows(value, value_cache, slots, kv_scales.value)


def store_rows(new: Tensor, cache: Tensor, slots: Tensor, scale: float = 1.0) -> None:
    """Of one cache. new: [num_tokens, num_kv_heads, head_dim]."""
    is_kept = slots != PADDING_SLOT
    places, stored = cache.view(-1, *new.shape[1:]), as_stored(new, cache.dtype, scale)
    if is_fp8(cache):
        # As bytes: torch indexes no float8.
        places, stored = places.view(torch.uint8), stored.view(torch.uint8)
    places[slots[is_kept]] = stored[is_kept]
