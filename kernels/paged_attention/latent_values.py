"""Caches whose values are the first numbers of their keys, as those of latents are."""

from torch import Tensor


def are_parts(key_cache: Tensor, value_cache: Tensor) -> bool:
    """Whether whoever has read keys has read their values with them."""
    return key_cache.data_ptr() == value_cache.data_ptr() and key_cache.stride() == value_cache.stride()


def gather(key_cache: Tensor, value_cache: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The keys and the values in these blocks, [..., block_size, num_kv_heads, head_dim], read once if they can be."""
    keys = key_cache[blocks]
    if are_parts(key_cache, value_cache):
        return keys, keys[..., : value_cache.shape[3]]
    return keys, value_cache[blocks]
