"""The paged KV cache's memory: how much there is, and what is done with whole blocks of it."""

import math
from collections.abc import Sequence

import numpy
import torch
from torch import Tensor

from ...kernels.kv_cache import copy_blocks, swap_in, swap_out
from ..checkpoints.model_config import ModelConfig
from ..checkpoints.model_size import kv_token_bytes
from ..errors import ConfigError
from ..transfer import to_device
from .block_pool import NULL_BLOCK


class KVMemory:
    """Keys and values of all layers: `caches` are shaped as `kv_shapes` says, with 1 + `num_blocks` blocks each.

    Zeros at first, not merely allocated: a stale NaN in an unwritten slot would pass through a mask as 0 × NaN. For the
    same reason `NULL_BLOCK`, which pads block tables, is never written.
    """

    def __init__(
        self, model: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes(model, block_size, dtype)
        self.device = device
        shapes = kv_shapes(model, NULL_BLOCK + 1 + num_blocks, block_size)
        self.caches = [zeros(shape, dtype, device) for shape in shapes]

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks, (source, destination); no block is both, or twice a destination."""
        sources, destinations = to_device(pairs, self.device).unbind(1)
        for cache in self.caches:
            copy_blocks(cache, sources, destinations)

    def zero(self, blocks: Sequence[int]) -> None:
        index = self._index(blocks)
        for cache in self.caches:
            # As bytes: torch indexes no float8.
            cache.view(torch.uint8).index_fill_(2, index, 0)

    def swap_out(self, blocks: Sequence[int]) -> list[Tensor]:
        """The blocks' content in the host's memory."""
        index = self._index(blocks)
        return [swap_out(cache, index) for cache in self.caches]

    def swap_in(self, content: Sequence[Tensor], first: int, blocks: Sequence[int]) -> None:
        """Put what `swap_out` gave, from its `first` block on, into these blocks."""
        index = self._index(blocks)
        for cache, held in zip(self.caches, content, strict=True):
            swap_in(cache, index, held, first)

    def _index(self, blocks: Sequence[int]) -> Tensor:
        return to_device(blocks, self.device)


def kv_shapes(model: ModelConfig, num_blocks: int, block_size: int) -> list[tuple[int, ...]]:
    """[rows, num_layers, num_blocks, block_size, num_kv_heads, head_dim] of each of the model's `kv_groups`.

    The rows are a token's key and its value, or one that is both (`ModelShape.num_kv_rows`). The null block is one of
    `num_blocks`.
    """
    return [
        (model.num_kv_rows, len(layers), num_blocks, block_size, *heads) for heads, layers in model.kv_groups.items()
    ]


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A zero tensor; on the CPU its pages take no memory before they are written (calloc, which torch does not use).

    Raises `ConfigError` where a CPU's system does not give that much.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    # What is empty has no bytes that could be seen as numbers.
    if device.type != "cpu" or not num_bytes:
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    try:
        content = numpy.zeros(num_bytes, dtype=numpy.uint8)
    # The latter where no address has so many bits.
    except (MemoryError, ValueError) as error:
        raise ConfigError(
            f"the system does not give {num_bytes:,} bytes for the KV cache: lower kv_cache_memory_bytes or "
            "num_gpu_blocks_override"
        ) from error
    return torch.from_numpy(content).view(dtype).view(tuple(shape))


def block_bytes(model: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes one KV block takes over all layers, keys and values."""
    return kv_token_bytes(model, dtype.itemsize) * block_size


def num_blocks_in(
    memory_bytes: int, model: ModelConfig, block_size: int, dtype: torch.dtype, beside_bytes: int = 0
) -> int:
    """How many KV blocks fit beside the null block, where each takes `beside_bytes` more of a second model's memory.

    Raises `ConfigError` when not even one does.
    """
    size = block_bytes(model, block_size, dtype) + beside_bytes
    if memory_bytes < 2 * size:
        raise ConfigError(f"kv_cache_memory_bytes={memory_bytes} is less than two KV blocks of {size} bytes")
    return memory_bytes // size - 1
