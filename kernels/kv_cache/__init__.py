"""Writing new keys and values into the paged KV cache, and moving whole blocks of it."""

from torch import Tensor

from .block_copy import copy_blocks, swap_in, swap_out
from .fp8 import FP8_LARGEST, UNSCALED, KVScales
from .reference import PADDING_SLOT, write_kv_reference


def write_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    kv_scales: KVScales = UNSCALED,
) -> None:
    """Store each token's key and value at its slot; changes the caches in place.

    key, value: [num_tokens, num_kv_heads, head_dim]. key_cache, value_cache:
    [num_blocks, block_size, num_kv_heads, head_dim], contiguous, of key's dtype or in FP8, which holds the quotients by
    `kv_scales`. slots: [num_tokens] int64, `block * block_size + offset`, each different, or `PADDING_SLOT`, for which
    nothing is stored.
    Raises `ValueError` naming the argument whose shape or dtype does not fit.
    """
    if key.shape != value.shape or key.shape[1:] != key_cache.shape[2:]:
        raise ValueError(
            f"key {tuple(key.shape)} and value {tuple(value.shape)} must be [num_tokens, "
            f"{key_cache.shape[2]}, {key_cache.shape[3]}] as the cache is"
        )
    if value_cache.shape != key_cache.shape:
        raise ValueError(f"value_cache {tuple(value_cache.shape)} must be {tuple(key_cache.shape)} as key_cache is")
    dtypes = {value.dtype, key_cache.dtype} if key_cache.dtype not in FP8_LARGEST else {value.dtype}
    if dtypes != {key.dtype} or value_cache.dtype != key_cache.dtype:
        raise ValueError(
            f"key is {key.dtype} and value {value.dtype}, key_cache {key_cache.dtype} and value_cache "
            f"{value_cache.dtype}; all must be one, or the caches one of FP8"
        )
    if slots.shape != key.shape[:1]:
        raise ValueError(f"slots {tuple(slots.shape)} must be [{key.shape[0]}], one a token")
    write_kv_reference(key, value, key_cache, value_cache, slots, kv_scales)


__all__ = ["PADDING_SLOT", "KVScales", "copy_blocks", "swap_in", "swap_out", "write_kv"]
