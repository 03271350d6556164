"""KV caches in 8-bit floats: what they hold, and what it stands for."""

from dataclasses import dataclass

import torch
from torch import Tensor

# Each format with the largest number that it has.
FP8_LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


@dataclass(frozen=True)
class KVScales:
    """What the numbers of a layer's FP8 cache are multiplied by to be keys and values. Other caches take no notice."""

    key: float = 1.0
    value: float = 1.0


UNSCALED = KVScales()


def is_fp8(cache: Tensor) -> bool:
    return cache.dtype in FP8_LARGEST


def as_stored(x: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """What a cache of this dtype holds of keys or values: what FP8 cannot reach becomes the largest it has."""
    if dtype not in FP8_LARGEST:
        return x
    largest = FP8_LARGEST[dtype]
    return (x.float() / scale).clamp(-largest, largest).to(dtype)


def gathered(cache: Tensor, blocks: list[int] | Tensor, scale: float) -> Tensor:
    """The keys or values in these blocks, float32: [len(blocks), block_size, num_kv_heads, head_dim]."""
    # As bytes: torch indexes no float8.
    chosen = cache.view(torch.uint8)[blocks].view(cache.dtype).float()
    return chosen * scale if is_fp8(cache) else chosen
