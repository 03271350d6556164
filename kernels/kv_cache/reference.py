"""The obvious torch; also the path that runs where no faster one exists."""

from torch import Tensor


def write_kv_reference(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """See `write_kv`."""
    key_cache.view(-1, *key.shape[1:])[slots] = key
    value_cache.view(-1, *value.shape[1:])[slots] = value
